"""A recipe with the objective, the sharding, the head and the kind of rows that it names, each made once."""

from functools import cached_property

from flytune.data.rows import RowKind, row_kind
from flytune.models import heads
from flytune.objectives import ObjectiveBase, objective_of
from flytune.recipe import Recipe
from flytune.sharding import ShardingBase, sharding_of


class BoundRecipe:
    """A recipe, and what it names. What has a recipe among its fields extends it."""

    recipe: Recipe

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @cached_property
    def objective(self) -> ObjectiveBase:
        """Return the goal of training."""
        return objective_of(self.recipe)

    @cached_property
    def sharding(self) -> ShardingBase:
        """Return how the model is divided.

        Raises:
            RecipeError: the recipe names none, and no plan has chosen one yet.
        """
        return sharding_of(self.recipe)

    @cached_property
    def head(self) -> heads.Head:
        """Return the head that is trained."""
        return heads.head_of(self.recipe)

    @cached_property
    def row_kind(self) -> RowKind:
        """Return the kind of rows that the objective reads."""
        return row_kind(self.recipe.row_kind, self.recipe.objective.negatives_of_a_row)
