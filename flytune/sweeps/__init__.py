"""Grids of recipes and their results."""

from flytune.sweeps.grid import Points
from flytune.sweeps.results import Outcome

__all__ = ["Outcome", "Points"]
