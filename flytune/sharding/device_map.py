"""One process, layers spread over the GPUs of one node (accelerate's device_map)."""

from typing import Any, ClassVar

from flytune.hardware import Shape
from flytune.recipe import Recipe
from flytune.records import Plan
from flytune.sharding.base import ShardingBase
from flytune.sharding.layout import Layout


class DeviceMap(ShardingBase):
    """Naive model parallelism: each GPU holds some consecutive layers, and one GPU computes at a time."""

    name = "device_map"
    estimated_as = Layout(name="device_map", data_parallel=False, pipelined=True)
    refuses: ClassVar = {
        "full": "a 16-bit model spread by layers keeps all GPUs but one idle; zero3 shards it and uses them all",
        "lora": "a 16-bit base spread by layers keeps all GPUs but one idle; zero3 shards it and uses them all",
    }

    def misfit(self, recipe: Recipe, shape: Shape) -> str | None:
        if shape.nodes > 1:
            return f"is one process on one node, and the shape has {shape.nodes} nodes"
        if not shape.is_gpu and shape.processes > 1:
            return f"is one process, and the shape has {shape.processes} ranks on its CPU"
        return None

    def processes(self, shape: Shape) -> int:
        return 1

    def load_arguments(self, recipe: Recipe, plan: Plan, shape: Shape) -> dict[str, Any]:
        if shape.processes == 1:
            return super().load_arguments(recipe, plan, shape)
        return {"device_map": "auto", "max_memory": dict.fromkeys(range(shape.processes), plan.room_for_weights)}

    def ready(self, trainer: Any, recipe: Recipe) -> None:
        # TRL computes the loss on the head's device and bypasses accelerate's hook, which would move the loss back. The Trainer
        # needs it on its own device, but accelerate puts a head that is not tied to the embedding on the last GPU.
        head = trainer.model.get_output_embeddings().to(trainer.args.device)
        if hook := getattr(head, "_hf_hook", None):
            hook.execution_device = trainer.args.device

    def check(self, trainer: Any) -> str | None:
        loaded = [getattr(trainer.model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8)]
        return None if any(loaded) else "the base model is not quantized"
