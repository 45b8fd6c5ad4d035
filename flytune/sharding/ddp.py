"""Distributed data parallel: every process holds all states, gradients are averaged in buckets."""

from typing import Any

from flytune.hardware import Shape
from flytune.sharding.base import ShardingBase
from training_estimates.layout import Layout


class DistributedDataParallel(ShardingBase):
    """torch.nn.parallel.DistributedDataParallel, as the Trainer wraps it."""

    name = "ddp"
    no_drawn_answers = None
    estimated_as = Layout(name="ddp", copies_gradients=True)
    traceable = True
    divides_sequences = True
    packed_selftests = ("full",)
    mixture_selftests = (("chats", "experts"), ("chats", "balance"))

    def misfit(self, shape: Shape) -> str | None:
        return None if shape.world_size > 1 else "needs two processes or more, and the shape has one"

    def arguments(self, shape: Shape) -> dict[str, Any]:
        # Every trained parameter of a causal language model gets a gradient; looking for unused ones costs a
        # pass.
        return {"ddp_find_unused_parameters": False, "ddp_backend": None if shape.is_gpu else "gloo"}

    def check(self, trainer: Any) -> str | None:
        kind = type(trainer.model_wrapped).__name__
        return None if kind == "DistributedDataParallel" else f"the model was wrapped as {kind}"
