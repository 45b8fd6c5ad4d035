"""The interface of a sharding: where it works, how the model is loaded and sharded, what the Trainer is given."""

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from flytune.hardware import Shape
from flytune.recipe import OPTIMIZERS, OptimizerKind, Recipe
from flytune.records import Plan
from flytune.sharding.layout import Layout

Precision = Literal["pure", "autocast", "policy"]
"""Precision of a forward pass. pure: in the dtype of the weights; autocast: torch.autocast; policy: FSDP's mixed precision."""


class ShardingBase:
    """One way to lay model and optimizer over processes. Subclasses contain only what differs."""

    name: ClassVar[str]
    """Value of `sharding` in recipes."""
    estimated_as: ClassVar[Layout]
    """Layout that flytune.estimates computes memory and time of."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Methods that cannot work with it, each with the reason."""
    offloads: ClassVar[tuple[str, ...]] = ("none",)
    """Supported values of sharding.offload."""
    no_8bit_base: ClassVar[str | None] = None
    """Reason why a base in 8 bits (method.load_in_8bit) does not work with it; None where it does."""
    float32_masters: ClassVar[str | None] = None
    """Reason why training.master_dtype is always float32 with it; None where it may be bfloat16."""
    no_reference_copy: ClassVar[str | None] = None
    """Reason why it cannot hold a second, frozen model beside the trained one (ReferenceKind copy); None where it can."""
    no_quantized_dora: ClassVar[str | None] = None
    """Reason why DoRA (method.use_dora) does not work with it on a quantized base; None where it does."""
    resizes: ClassVar[bool] = True
    """True if a run can resume from a checkpoint of another number of processes."""
    saves_full_weights: ClassVar[bool] = True
    """True if its checkpoints hold full weights (safetensors), not only each process's part of them; publish.every_save
    gathers those parts, and writes the weights once more."""
    async_checkpoint: ClassVar[bool] = False
    """True if checkpoints are copied to host memory, and written from there while training continues."""
    prepares_kbit: ClassVar[bool] = True
    """True if TRL makes what is not quantized of a qlora base float32 (prepare_model_for_kbit_training)."""
    traceable: ClassVar[bool] = False
    """True if the dry run can trace it on fake tensors."""
    packed_selftests: ClassVar[tuple[str, ...]] = ()
    """Methods that the selftest also trains on packed rows."""

    def misfit(self, recipe: Recipe, shape: Shape) -> str | None:
        """Return why it cannot run on `shape`; None if it can."""
        return None

    def problems(self, recipe: Recipe) -> list[str]:
        """List what no shape solves: options of the recipe that contradict each other or cannot be used, a line each."""
        if recipe.sharding.config is None:
            return []
        return [f"sharding.config: {self.name} reads no DeepSpeed configuration; remove it, or name zero1, zero2 or zero3"]

    def batch_problem(self, recipe: Recipe, micro_batch: int, accumulation: int) -> str | None:
        """Return why it cannot run with these batches; None if it can."""
        return None

    def layout(self, recipe: Recipe) -> Layout:
        """Return the layout that memory and time are estimated of, with the recipe's options."""
        return self.estimated_as

    def reasons(self, recipe: Recipe) -> list[str]:
        """List the options that the plan names, a line each."""
        return []

    def processes(self, shape: Shape) -> int:
        """Return the number of processes on a node."""
        return shape.processes

    def optimizer_problem(self, recipe: Recipe, kind: OptimizerKind) -> str | None:
        """Return why an optimizer does not work with it; None if it does."""
        return None

    def optimizer(self, recipe: Recipe) -> str:
        """Return the optimizer in transformers' spelling: the recipe's, or what `auto` means for its method."""
        if recipe.training.optim != "auto":
            return recipe.training.optim
        paged = recipe.method.name == "qlora" and not self.optimizer_problem(recipe, OPTIMIZERS["paged_adamw_8bit"])
        return "paged_adamw_8bit" if paged else "adamw_torch_fused"

    def load_dtype(self, recipe: Recipe) -> str:
        """Return the dtype that the base model's weights are loaded in.

        A full fine-tune keeps its weights in training.master_dtype and computes in recipe.model.dtype by autocast: bfloat16
        weights lose updates smaller than 1/256 of a weight. A frozen base is loaded in the dtype it computes in.
        """
        return recipe.training.master_dtype if recipe.method.name == "full" else recipe.model.dtype

    def precision(self, recipe: Recipe) -> Precision:
        """Return how the forward pass computes."""
        return "pure" if self.load_dtype(recipe) == recipe.model.dtype == "float32" else "autocast"

    def quant_storage(self, recipe: Recipe) -> str:
        """Return the dtype that 4-bit weights are packed into; parameters that are sharded together must share one."""
        return "uint8"

    def arguments(self, recipe: Recipe, shape: Shape) -> dict[str, Any]:
        """Return keyword arguments of TRL's SFTConfig; they replace those that all shardings share."""
        return {}

    def load_arguments(self, recipe: Recipe, plan: Plan, shape: Shape) -> dict[str, Any]:
        """Return keyword arguments of from_pretrained. A qlora base is quantized on each process's own device."""
        if recipe.method.name != "qlora":
            return {}
        return {"device_map": {"": int(os.environ.get("LOCAL_RANK", "0")) if shape.is_gpu else "cpu"}}

    def reads_slices(self, recipe: Recipe) -> bool:
        """Return whether each process reads only its own part of the base model, after `shard` has set which."""
        return False

    def before_load(self, device_type: str) -> None:
        """Prepare the process, after SFTConfig has initialized the device and before the model is loaded."""

    def shard(self, trainer: Any, recipe: Recipe) -> None:
        """Shard the built trainer's model, where the Trainer does not do it itself."""

    def ready(self, trainer: Any, recipe: Recipe) -> None:
        """Make the last changes before training, when the model has its weights."""

    def before_gather(self, model: Any) -> None:
        """Prepare the model once, before parameters are gathered."""

    def gather(self, parameter: Any) -> Any:
        """Return the full parameter. All processes call it at once; only the first uses the value."""
        return parameter

    def check(self, trainer: Any) -> str | None:
        """Return how the built trainer's sharding differs from what was promised; None if it does not."""
        return None
