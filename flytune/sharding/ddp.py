"""Distributed data parallel: every process holds everything, gradients are averaged in buckets."""

from typing import Any

from flytune.hardware.shapes import Shape
from flytune.recipe.recipe import Recipe
from flytune.sharding.base import Strategy


class DistributedDataParallel(Strategy):
    """torch.nn.parallel.DistributedDataParallel, as the Trainer wraps it."""

    name = counted_as = "ddp"

    def misfit(self, recipe: Recipe, shape: Shape) -> str | None:
        return None if shape.world_size > 1 else "needs two processes or more, and the shape has one"

    def arguments(self, recipe: Recipe, shape: Shape) -> dict[str, Any]:
        # Every trained parameter of a causal language model gets a gradient; looking for unused ones costs a pass.
        return {"ddp_find_unused_parameters": False, "ddp_backend": None if shape.is_gpu else "gloo"}

    def check(self, trainer: Any) -> str | None:
        kind = type(trainer.model_wrapped).__name__
        return None if kind == "DistributedDataParallel" else f"the model was wrapped as {kind}"
