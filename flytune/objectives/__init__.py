"""All objectives, by name. A new one is a file in this folder, and its name in flytune.recipe.objective.Objective."""

from flytune.objectives.base import FILLER, ObjectiveBase, ReferenceKind
from flytune.objectives.dpo import DirectPreference
from flytune.objectives.kto import UnpairedPreference
from flytune.objectives.reward import Reward
from flytune.objectives.sft import Supervised
from flytune.recipe import Recipe

__all__ = ["FILLER", "OBJECTIVES", "ObjectiveBase", "ReferenceKind", "Supervised", "objective_of"]

_KINDS: tuple[type[ObjectiveBase], ...] = (Supervised, DirectPreference, UnpairedPreference, Reward)
OBJECTIVES: dict[str, type[ObjectiveBase]] = {kind.name: kind for kind in _KINDS}


def objective_of(recipe: Recipe) -> ObjectiveBase:
    """Return the objective that a recipe names."""
    return OBJECTIVES[recipe.objective.name]()
