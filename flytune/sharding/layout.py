"""Layouts of a model's states over GPUs, as the estimates of memory and time see them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Properties of a sharding from which memory, communication and step time follow.

    Parameters are only sharded where optimizer states and gradients are.
    """

    name: str
    """Name in the tables of the benchmarks."""
    data_parallel: bool = True
    """True if each GPU trains samples of its own, so that gradients are exchanged."""
    pipelined: bool = False
    """True if the GPUs hold different layers of one copy of the model and take turns."""
    shards_optimizer: bool = False
    shards_gradients: bool = False
    shards_parameters: bool = False
    gathers_in_backward: bool = False
    """True if sharded parameters are dropped after the forward pass and gathered again for backward."""
    copies_gradients: bool = False
    """True if gradients are copied into buckets of their total size (torch's DistributedDataParallel)."""
    deepspeed: bool = False
    """True if DeepSpeed holds the states: 16-bit weights, float32 master copies, buckets of a fixed size, no autocast."""
    retains_frozen: bool = False
    """True if tensors of units with frozen parameters live until backward ends, as under FSDP1."""

    @property
    def fsdp(self) -> bool:
        """True if torch's FSDP shards the model."""
        return self.shards_parameters and not self.deepspeed
