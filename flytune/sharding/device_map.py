"""One process, layers spread over the GPUs of one node (accelerate's device_map)."""

from typing import Any, ClassVar

from flytune.hardware import Shape
from flytune.records import Plan
from flytune.sentences import counted
from flytune.sharding.base import ShardingBase
from training_estimates.layout import Layout


class DeviceMap(ShardingBase):
    """Naive model parallelism: each GPU holds some consecutive layers, and one GPU computes at a time."""

    name = "device_map"
    estimated_as = Layout(name="device_map", pipelined=True)
    no_sequence_head = "its result is on the last GPU, and the Trainer needs the loss on the first"
    refuses: ClassVar = {
        "full": "a 16-bit model spread by layers keeps all GPUs but one idle; zero3 shards it and uses them "
        "all",
        "lora": "a 16-bit base spread by layers keeps all GPUs but one idle; zero3 shards it and uses them "
        "all",
    }

    def misfit(self, shape: Shape) -> str | None:
        if shape.nodes > 1:
            return f"is one process on one node, and the shape has {counted(shape.nodes, 'node')}"
        if not shape.is_gpu and shape.processes > 1:
            return f"is one process, and the shape has {counted(shape.processes, 'rank')} on its CPU"
        return None

    def load_arguments(self, plan: Plan, shape: Shape) -> dict[str, Any]:
        if shape.processes == 1:
            return super().load_arguments(plan, shape)
        return {
            "device_map": "auto",
            "max_memory": dict.fromkeys(range(shape.processes), plan.room_for_weights),
        }

    def ready(self, trainer: Any) -> None:
        # TRL computes the loss on the head's device and bypasses accelerate's hook, which would move the loss
        # back. The Trainer needs it on its own device, but accelerate puts a head that is not tied to the
        # embedding on the last GPU.
        head = trainer.model.get_output_embeddings().to(trainer.args.device)
        if hook := getattr(head, "_hf_hook", None):
            hook.execution_device = trainer.args.device

    def check(self, trainer: Any) -> str | None:
        loaded = [getattr(trainer.model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8)]
        return None if any(loaded) else "the base model is not quantized"
