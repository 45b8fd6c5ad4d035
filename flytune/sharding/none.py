"""No sharding: one process on one device holds everything."""

from flytune.hardware.shapes import Shape
from flytune.recipe.recipe import Recipe
from flytune.sharding.base import Strategy


class NoSharding(Strategy):
    """One process, one device."""

    name = counted_as = "none"

    def misfit(self, recipe: Recipe, shape: Shape) -> str | None:
        if shape.world_size > 1:
            return f"is one process, and the shape has {shape.world_size}"
        return None
