"""What a sharding says about itself: where it works, what it holds in memory, what it tells the Trainer."""

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from flytune.hardware.shapes import Shape
from flytune.recipe.recipe import Recipe
from flytune.records.plan import Plan

Layout = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp1_grad_op", "fsdp2", "fsdp2_grad_op", "device_map"]
"""Layouts of model and optimizer states over processes that the estimates know."""


class Strategy:
    """One way of laying model and optimizer over processes. Subclasses say only what differs."""

    name: ClassVar[str]
    counted_as: ClassVar[Layout]
    """What flytune.estimates.model_states and flytune.estimates.communication count it as."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Methods that cannot work with it, with the reason."""
    offloads: ClassVar[tuple[str, ...]] = ("none",)
    """Values of sharding.offload that it has."""
    no_8bit_optimizer: ClassVar[str | None] = None
    """Why it cannot work with training.optim of 8 bits, if it cannot."""
    resizes: ClassVar[bool] = True
    """Whether a run can go on from a checkpoint of another number of processes."""

    async_checkpoint: ClassVar[bool] = False
    """True if its checkpoints are sharded ones of torch.distributed.checkpoint, which can be written asynchronously."""
    saves_whole: ClassVar[bool] = True
    """Whether its checkpoints hold whole weights (safetensors), and not each process's part of them alone."""

    def misfit(self, recipe: Recipe, shape: Shape) -> str | None:
        """Why it cannot run on `shape`, if it cannot."""
        return None

    def processes(self, shape: Shape) -> int:
        """Processes on a node."""
        return shape.processes

    def gpus_per_process(self, shape: Shape) -> int:
        return 1

    def optimizer(self, recipe: Recipe) -> str:
        """The optimizer in transformers' spelling: the recipe's, or what `auto` means for its method."""
        if recipe.training.optim != "auto":
            return recipe.training.optim
        return "paged_adamw_8bit" if recipe.method.name == "qlora" and not self.no_8bit_optimizer else "adamw_torch_fused"

    def load_dtype(self, recipe: Recipe) -> str:
        """The dtype that the base model's weights are loaded in.

        A full fine-tune keeps float32 weights and computes in recipe.model.dtype by autocast: bfloat16 weights lose
        updates smaller than 1/256 of a weight. A frozen base is loaded as it will be computed with.
        """
        return "float32" if recipe.method.name == "full" else recipe.model.dtype

    def quant_storage(self, recipe: Recipe) -> str:
        """The dtype that 4-bit weights are packed into; what is sharded must look like the rest."""
        return "uint8"

    def arguments(self, recipe: Recipe, shape: Shape) -> dict[str, Any]:
        """Keyword arguments of TRL's SFTConfig; they go before those that every strategy has."""
        return {}

    def load_arguments(self, recipe: Recipe, plan: Plan, shape: Shape) -> dict[str, Any]:
        """Keyword arguments of from_pretrained. A 4-bit model is quantized where it stays: each process's own device."""
        if recipe.method.name != "qlora":
            return {}
        return {"device_map": {"": int(os.environ.get("LOCAL_RANK", "0")) if shape.is_gpu else "cpu"}}

    def reads_slices(self, recipe: Recipe) -> bool:
        """Whether each process reads only its own part of the base model, once `shard` has said which."""
        return False

    def before_load(self, device_type: str) -> None:
        """Runs once the arguments are built and their device was touched, before the model is loaded."""

    def shard(self, trainer: Any, recipe: Recipe) -> None:
        """Lays the built trainer's model over the processes, where the Trainer does not do it itself."""

    def ready(self, trainer: Any, recipe: Recipe) -> None:
        """Runs last before training, when the model has its weights."""

    def before_gather(self, model: Any) -> None:
        """Runs once, before parameters are gathered."""

    def gather(self, parameter: Any) -> Any:
        """The whole parameter; called by all processes at once, its value is used by the first."""
        return parameter

    def check(self, trainer: Any) -> str | None:
        """What is wrong with the built trainer, if it is not sharded as promised."""
        return None
