"""The plan of a run: candidates, requirements, ranking, calibration."""

from flytune.planning.budget import Budget
from flytune.planning.uploads import Local

__all__ = [
    "Budget",
    "Local",
    "base_sizes",
    "budget",
    "calibration",
    "code_files",
    "comparing",
    "document",
    "drawn",
    "evaluation_shape",
    "folders",
    "largest",
    "planner",
    "sample_count",
    "save_interval",
    "signed_uploads",
    "solving",
    "table",
    "uploads",
]
