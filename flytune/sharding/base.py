"""The interface of a sharding: where it works, how the model is loaded and sharded, what the Trainer is
given."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from flytune.hardware import Shape
from flytune.recipe import OPTIMIZERS, OptimizerKind, Recipe
from flytune.records import Plan
from flytune.sentences import counted
from training_estimates.degrees import Degrees
from training_estimates.layout import Layout
from training_estimates.workload import Precision

UNSHARDED_COPY = "each process would hold a second model that is not sharded (a sharded copy is not built)"
"""Reason why no second model is held beside a sharded one."""
NOTHING_PAGED = "states that are offloaded are never on the GPU, and have nothing to be paged from"
"""Reason why paged states are not offloaded."""


class ShardingBase:
    """One way to lay the model and the optimizer of a recipe over processes. Subclasses contain only what
    differs."""

    name: ClassVar[str]
    """Value of `sharding` in recipes."""
    estimated_as: ClassVar[Layout]
    """Layout that training_estimates computes memory and time of."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Methods that cannot work with it, each with the reason."""
    offloads: ClassVar[tuple[str, ...]] = ("none",)
    """Supported values of sharding.offload."""
    no_8bit_base: ClassVar[str | None] = None
    """Reason why a base in 8 bits (method.load_in_8bit) does not work with it; None where it does."""
    float32_masters: ClassVar[str | None] = None
    """Reason why training.master_dtype is always float32 with it; None where it may be bfloat16."""
    no_reference_copy: ClassVar[str | None] = None
    """Reason why it cannot hold a second, frozen model beside the trained one (ReferenceKind copy); None
    where it can."""
    no_quantized_dora: ClassVar[str | None] = None
    """Reason why DoRA (method.use_dora) does not work with it on a quantized base; None where it does."""
    resizes: ClassVar[bool] = True
    """True if a run can resume from a checkpoint of another number of processes."""
    async_checkpoint: ClassVar[bool] = False
    """True if checkpoints are copied to host memory, and written from there while training continues."""
    kbit_float32: ClassVar[bool] = True
    """True if what is not quantized of a qlora base is float32 in training (TRL's
    prepare_model_for_kbit_training)."""
    saves_gathered: ClassVar[bool] = False
    """True if a save gathers all trained weights in the host memory of one process, not a file's at a
    time."""
    loads_whole_states: ClassVar[bool] = False
    """True if a process loads its part of a checkpoint, optimizer states included, at once, not a tensor at a
    time."""
    no_sequence_head: ClassVar[str | None] = None
    """Reason why a head of a few outputs cannot be trained with it; None where it can."""
    no_drawn_answers: ClassVar[str | None] = "drawing answers is not tested with it"
    """Reason why an objective cannot draw answers from the trained model with it; None where it can."""
    replicates: ClassVar[bool] = False
    """True if it takes sharding.replicas."""
    divides_sequences: ClassVar[bool] = False
    """True if it takes sharding.sequence_parallel."""
    is_plain: ClassVar[bool] = False
    """True if it shares nothing: plain training in one process."""
    traceable: ClassVar[bool] = False
    """True if the dry run can trace it on fake tensors."""
    libraries: ClassVar[tuple[str, ...]] = ()
    """Modules that training imports with it, and that ask for compiled functions when they are imported."""
    packed_selftests: ClassVar[tuple[str, ...]] = ()
    """Methods that the selftest also trains on packed rows."""
    divided_selftests: ClassVar[tuple[str, ...]] = ()
    """Methods that the selftest also trains with sequence parallelism."""
    grouped_selftests: ClassVar[tuple[str, ...]] = ()
    """Methods that the selftest also trains in groups of processes."""
    mixture_selftests: ClassVar[tuple[tuple[str, str], ...]] = (("chats", "experts"),)
    """Rows and model of the selftest's runs with adapters on experts."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def misfit(self, shape: Shape) -> str | None:
        """Return why it cannot run on `shape`; None if it can."""
        return None

    def problems(self) -> list[str]:
        """List what no shape solves: options of the recipe that contradict each other or cannot be used, a
        line each."""
        if self.recipe.sharding.config is None:
            return []
        return [
            f"sharding.config: {self.name} reads no DeepSpeed configuration; remove it, or name zero1, zero2 "
            "or zero3"
        ]

    def batch_problem(self, micro_batch: int, accumulation: int) -> str | None:
        """Return why it cannot run with these batches; None if it can."""
        return None

    @property
    def layout(self) -> Layout:
        """Layout that memory and time are estimated of, with the recipe's options."""
        parts = self.recipe.sharding.sequence_parallel
        return dataclasses.replace(self.estimated_as, sequence_parallel=parts)

    def reasons(self) -> list[str]:
        """List the options that the plan names, a line each."""
        return []

    def degrees(self, shape: Shape) -> Degrees:
        """Return the number of processes on a shape, and what they divide."""
        return self.layout.degrees(shape.world_size, shape.nodes)

    def sequence_misfit(self, shape: Shape) -> str | None:
        """Return why samples cannot be divided among processes of `shape`; None if they can."""
        parts = self.recipe.sharding.sequence_parallel
        if shape.processes % parts == 0:
            return None
        able = [count for count in range(1, shape.processes + 1) if shape.processes % count == 0]
        return (
            f"sharding.sequence_parallel: {parts} does not divide the "
            f"{counted(shape.processes, 'process', 'processes')} "
            f"of a node, inside of which samples are divided; numbers that do: {', '.join(map(str, able))}"
        )

    def optimizer_problem(self, kind: OptimizerKind) -> str | None:
        """Return why an optimizer does not work with it; None if it does."""
        return None

    @property
    def optimizer(self) -> str:
        """Optimizer in transformers' spelling: the recipe's, or what `auto` means for its method."""
        if self.recipe.training.optim != "auto":
            return self.recipe.training.optim
        paged = self.recipe.method.name == "qlora" and not self.optimizer_problem(
            OPTIMIZERS["paged_adamw_8bit"]
        )
        return "paged_adamw_8bit" if paged else "adamw_torch_fused"

    @property
    def load_dtype(self) -> str:
        """Dtype that the base model's weights are loaded in.

        A full fine-tune keeps its weights in training.master_dtype and computes in recipe.model.dtype by
        autocast: bfloat16 weights lose updates smaller than 1/256 of a weight. A frozen base is loaded in the
        dtype it computes in.
        """
        return (
            self.recipe.training.master_dtype
            if self.recipe.method.name == "full"
            else self.recipe.model.dtype
        )

    @property
    def precision(self) -> Precision:
        """Precision of the forward pass."""
        return "pure" if self.load_dtype == self.recipe.model.dtype == "float32" else "autocast"

    @property
    def uses_autocast(self) -> bool:
        """True if the forward pass runs under torch.autocast in model.dtype."""
        return self.precision == "autocast" and self.recipe.model.dtype != "float32"

    @property
    def quant_storage(self) -> str:
        """Dtype that 4-bit weights are packed into; parameters that are sharded together must share one."""
        return "uint8"

    def arguments(self, shape: Shape) -> dict[str, Any]:
        """Return keyword arguments of TRL's SFTConfig; they replace those that all shardings share."""
        return {}

    def load_arguments(self, plan: Plan, shape: Shape) -> dict[str, Any]:
        """Return keyword arguments of from_pretrained. A qlora base is quantized on each process's own
        device."""
        if self.recipe.method.name != "qlora":
            return {}
        return {"device_map": {"": int(os.environ.get("LOCAL_RANK", "0")) if shape.is_gpu else "cpu"}}

    @property
    def reads_slices(self) -> bool:
        """True if each process reads only its own part of the base model, after `shard` has set which."""
        return False

    @property
    def loads_by_tensor(self) -> bool:
        """True if no process holds more of the base model than one tensor in host memory while it loads."""
        return self.recipe.method.name == "qlora" or self.reads_slices

    def before_load(self, device_type: str) -> None:
        """Prepare the process, after SFTConfig has initialized the device and before the model is loaded."""

    def shard(self, trainer: Any) -> None:
        """Shard the built trainer's model, where the Trainer does not do it itself."""

    def ready(self, trainer: Any) -> None:
        """Make the last changes before training, when the model has its weights."""

    def before_gather(self, model: Any) -> None:
        """Prepare the model, as the Trainer has wrapped it, once before parameters are gathered."""

    def gather(self, parameter: Any) -> Any:
        """Return the full parameter. All processes call it at once; only the first uses the value."""
        return parameter

    def check(self, trainer: Any) -> str | None:
        """Return how the built trainer's sharding differs from what was promised; None if it does not."""
        return None
