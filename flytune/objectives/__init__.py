"""All objectives, by name. A new one is a file in this folder, named as its section
(flytune.recipe.objectives)."""

from collections.abc import Sequence
from importlib import import_module

from flytune.models import Row, heads
from flytune.models.scoring import gate_sequences
from flytune.objectives.base import FILLER, ObjectiveBase
from flytune.objectives.sft import Supervised
from flytune.recipe import SECTIONS, Recipe

__all__ = ["FILLER", "OBJECTIVES", "ObjectiveBase", "objective_of", "of_gate"]

OBJECTIVES: dict[str, type[ObjectiveBase]] = {
    name: import_module(f"flytune.objectives.{name}").OBJECTIVE for name in SECTIONS
}


def objective_of(recipe: Recipe) -> ObjectiveBase:
    """Return the objective that a recipe names, bound to the recipe."""
    return OBJECTIVES[recipe.objective.name](recipe)


def of_gate(recipe: Recipe, rows: Sequence[Row]) -> tuple[Sequence[Row], ObjectiveBase]:
    """Return the held-out rows that the gate compares, and what measures them: of a language model the
    tokens' loss, whatever its objective."""
    if heads.head_of(recipe) is heads.LANGUAGE_MODEL:
        return gate_sequences(rows), Supervised(recipe)
    return rows, objective_of(recipe)
