"""Shipped recipes, and the content of a minimal one; the models in a type."""

import typing

import pytest
from pydantic import BaseModel

from flytune.errors import RecipeError
from flytune.recipe import Recipe
from tests.support.paths import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def content(**changes):
    recipe = {
        "name": "r",
        "model": {"name_or_path": "owner/name"},
        "data": {"path": "x.jsonl"},
        "method": "full",
        "sharding": "none",
        "training": {"learning_rate": "2e-4", "global_batch_size": 8},
    }
    return recipe | changes


def mistakes_of(recipe):
    """Return the refusal of a recipe's content."""
    with pytest.raises(RecipeError) as caught:
        Recipe.model_validate(recipe)
    return str(caught.value)


def models_of(annotation):
    """List the models in a type: of `list[WeightedSource]`, one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in models_of(argument)]
