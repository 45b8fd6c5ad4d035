"""Points of a sweep."""

import pytest

from flytune.errors import RecipeError
from flytune.recipe import Recipe
from flytune.sweeps import grid
from tests.support.recipes import content


def test_points_without_held_out_samples_cannot_be_compared():
    recipe = Recipe.model_validate(content(data={"path": "x", "heldout_fraction": 0}))
    with pytest.raises(
        RecipeError,
        match=r"data.heldout_fraction: 0, but points are compared .*; write a share, such as 0\.02$",
    ):
        grid.draw(recipe, {"training.learning_rate": [1e-4, 1e-3]}, [], 10)
