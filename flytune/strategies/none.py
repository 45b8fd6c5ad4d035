"""No sharding: one process on one device holds everything."""

from typing import ClassVar

from flytune.models import Geometry
from flytune.recipe import Recipe
from flytune.shapes import Shape
from flytune.strategies.strategy import Strategy, unsharded_states


class NoSharding(Strategy):
    """One process, one device."""

    name = "none"
    refuses: ClassVar = {"qlora": "a 4-bit model is placed on its device at load, which is what device_map does"}

    def misfit(self, recipe: Recipe, shape: Shape) -> str | None:
        if shape.world_size > 1:
            return f"is one process, and the shape has {shape.world_size}"
        return None

    def states(self, geometry: Geometry, recipe: Recipe, world_size: int) -> dict[str, float]:
        return unsharded_states(geometry, recipe, self.load_dtype(recipe))
