"""No sharding: one process on one device holds everything."""

from flytune.hardware import Shape
from flytune.sharding.base import ShardingBase
from training_estimates.layout import Layout


class NoSharding(ShardingBase):
    """One process, one device."""

    name = "none"
    is_plain = True
    no_drawn_answers = None
    estimated_as = Layout(name="none")
    traceable = True
    packed_selftests = ("full", "qlora")
    mixture_selftests = (("chats", "experts"), ("packed", "experts"))

    def misfit(self, shape: Shape) -> str | None:
        if shape.world_size > 1:
            return f"is one process, and the shape has {shape.world_size}"
        return None
