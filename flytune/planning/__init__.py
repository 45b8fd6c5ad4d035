"""The plan of a run: candidates, requirements, ranking, calibration."""

from flytune.planning.budget import Budget

__all__ = [
    "Budget",
    "base_sizes",
    "budget",
    "calibration",
    "comparing",
    "document",
    "drawn",
    "largest",
    "planner",
    "sample_count",
    "save_interval",
    "solving",
    "table",
]
