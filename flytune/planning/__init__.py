"""The plan of a run: candidates, requirements, ranking, calibration, the dry run."""

from flytune.planning.budget import Budget
from flytune.planning.uploads import Local

__all__ = [
    "Budget",
    "Local",
    "budget",
    "calibration",
    "dryrun",
    "evaluation_shape",
    "folders",
    "planner",
    "sample_count",
    "save_interval",
    "table",
    "uploads",
]
