"""The plan of a run: candidates, requirements, ranking, calibration."""

from flytune.planning.budget import Budget

__all__ = ["Budget"]
