"""ZeRO's partitions in a ledger: DeepSpeed's own buffers, of the sizes that the closed form counts too.

DeepSpeed itself does not run on fake tensors. The model computes with whole parameters, of which the ledger
holds a partition under stage 3, beside those that are gathered; gradients are dropped as soon as DeepSpeed
would have copied them.
"""

from dataclasses import dataclass, field
from typing import Any

from flytune.dryrun import quantized
from flytune.dryrun.allocations import (
    COMMUNICATION,
    GATHERED,
    GRADIENTS,
    MASTERS,
    OPTIMIZER,
    PARAMETERS,
    AllocationLedger,
)
from flytune.dryrun.case import Case
from training_estimates.zero import ZeroParts


@dataclass(slots=True)
class Partitions:
    """Buffers of one process, counted of the complete model, some of whose layers may be left out later."""

    parts: ZeroParts
    live_bytes: float
    dtype: Any
    held: dict[str, list[Any]] = field(default_factory=dict)

    def again(self) -> "Partitions":
        """Return the same for another trace."""
        return Partitions(self.parts, self.live_bytes, self.dtype)

    def cast(self, model: Any) -> None:
        """Give all parameters the dtype that DeepSpeed computes in (engine.py,
        _configure_distributed_model)."""
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.dtype)

    def load(self, model: Any, ledger: AllocationLedger) -> None:
        """Partition the parameters of a loaded model, and allocate what lasts."""
        layout = self.parts.layout
        for parameter in model.parameters() if layout.shards_parameters else ():
            life = ledger.life_of(parameter)
            if life is not None and parameter.numel() >= layout.persistent:
                size = -(-parameter.numel() // self.parts.shards) * parameter.itemsize
                life.bytes = -(-size // ledger.rounding) * ledger.rounding
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda reduced: self._reduced(reduced, ledger))
        numbers, updated = round(self.parts.partition), round(self.parts.updated)
        self.held[MASTERS] = [
            self._empty(min(updated, numbers - start), "float32")
            for start in range(0, numbers, max(1, updated))
        ]
        ledger.mark(self.held[MASTERS], MASTERS)
        if layout.shards_parameters:
            # They are allocated once, and stay.
            self._hold(GRADIENTS, self.parts.gradient_bytes, ledger)
            self._hold(COMMUNICATION, self.parts.bucket_bytes, ledger)

    def before_forward(self, ledger: AllocationLedger) -> None:
        self._hold(GATHERED, self.live_bytes, ledger)

    def after_backward(self) -> None:
        self.held.pop(GATHERED)
        if not self.parts.layout.shards_parameters:
            self.held.pop(COMMUNICATION, None)

    def before_update(self, ledger: AllocationLedger) -> None:
        """Let the gradients of a partition be all that is left of them, as it is before the update; the
        others are freed."""
        if GRADIENTS not in self.held:
            self._hold(GRADIENTS, self.parts.width * self.parts.partition, ledger)

    def gradient_of(self, master: Any) -> Any:
        """Return gradients in float32 for the update of a part, which are flattened first (stage_1_and_2.py,
        step)."""
        return self._empty(master.numel(), self.dtype).float()

    def after_update(self) -> None:
        if not self.parts.layout.shards_parameters:
            self.held.pop(GRADIENTS, None)

    def _reduced(self, parameter: Any, ledger: AllocationLedger) -> None:
        """Put a gradient into the buckets; stages 1 and 2 allocate them with the first one.

        A bucket is reduced into the partition with the second one at the earliest.
        """
        if COMMUNICATION not in self.held:
            self._hold(COMMUNICATION, self.parts.bucket_bytes, ledger)
        elif self.parts.layout.shards_gradients and GRADIENTS not in self.held:
            self._hold(GRADIENTS, self.parts.gradient_bytes, ledger)
        if self.parts.layout.shards_gradients:
            parameter.grad = None

    def _hold(self, kind: str, size: float, ledger: AllocationLedger) -> None:
        self.held[kind] = [self._empty(round(size), "uint8")]
        ledger.mark(self.held[kind], kind)

    @staticmethod
    def _empty(numbers: int, dtype: Any) -> Any:
        import torch

        return torch.empty(numbers, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def of(case: Case, model: Any) -> Partitions | None:
    """Return the partitions of a complete model on the meta device; None where DeepSpeed does not shard
    it."""
    import torch

    layout = case.sharding.layout
    if not layout.deepspeed:
        return None
    dtype = getattr(torch, case.recipe.model.dtype)
    packed = {id(layer.weight) for layer in quantized.layers(model).values()}
    base = trained = 0.0
    for parameter in model.parameters():
        if parameter.requires_grad:
            trained += parameter.numel()
        if case.recipe.method.name == "full" or not parameter.requires_grad:
            base += parameter.numel() * (0.5 if id(parameter) in packed else dtype.itemsize)
    parts = ZeroParts(layout, case.degrees.shards, trained, dtype.itemsize)
    return Partitions(parts, parts.live_bytes(base, model.get_input_embeddings().weight.numel()), dtype)


def on_host(case: Case) -> set[str]:
    """Return the kinds that are not on the GPU."""
    offload, layout = case.recipe.sharding.offload, case.sharding.layout
    if not layout.deepspeed:
        return {PARAMETERS, GRADIENTS, OPTIMIZER} if offload == "cpu" else set()
    kinds = set[str]()
    if (layout.optimizer_on or offload) != "none":
        kinds |= {OPTIMIZER, MASTERS} | ({GRADIENTS} if layout.shards_parameters else set())
    if layout.shards_parameters and (layout.parameters_on or offload) != "none":
        kinds.add(PARAMETERS)
    return kinds
