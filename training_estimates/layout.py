"""Layouts of a model's states over GPUs, as the estimates of memory and time see them."""

from dataclasses import dataclass
from typing import Literal

from training_estimates.degrees import Degrees


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Properties of a sharding from which memory, communication and step time follow.

    Parameters are only sharded where optimizer states and gradients are.
    """

    name: str
    """Name in the tables of the benchmarks."""
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
    """True if DeepSpeed holds the states: 16-bit weights, float32 master copies, buckets of a fixed size, no
    autocast."""
    bucket: int = 200_000_000
    """Elements of a bucket of DeepSpeed's (reduce_bucket_size; 5e8 by default, 2e8 in the configurations in
    use)."""
    overlaps: bool = True
    """True if gradients are reduced while backward computes; DeepSpeed then has two buckets
    (overlap_comm)."""
    live: int = 1_000_000_000
    """Elements of parameters that ZeRO-3 may hold gathered (stage3_max_live_parameters)."""
    sub_group: int = 1_000_000_000
    """Elements that one step of ZeRO-3's optimizer updates (sub_group_size)."""
    persistent: int = 0
    """Elements below which ZeRO-3 leaves a parameter whole on each GPU; 0 where it is filled in, which covers
    norms alone."""
    optimizer_on: Literal["none", "cpu", "nvme"] | None = None
    """Device that optimizer states are offloaded to, where it differs from the workload's."""
    parameters_on: Literal["none", "cpu", "nvme"] | None = None
    """Device that parameters are offloaded to, where it differs from the workload's."""
    optimizer_buffers: int = 0
    """Buffers in host memory through which optimizer states go to the NVMe disk, each of one sub group's
    size."""
    parameter_buffers: int = 0
    """Elements of the buffers in host memory through which parameters go to the NVMe disk."""
    replicas: int | None = 1
    """Groups of GPUs that each hold all sharded states; None for one on each node."""
    sequence_parallel: int = 1
    """GPUs that divide the positions of each sample among themselves."""
    parameters_in_host: int = 0
    """Elements of parameters that stay in host memory under offload to NVMe, at most."""

    def degrees(self, gpus: int, nodes: int) -> Degrees:
        """Return the degrees of a run on GPUs of several nodes; on CPUs, a process counts as a GPU."""
        turns = gpus if self.pipelined else 1
        replicas = nodes if self.replicas is None else self.replicas
        return Degrees(gpus // turns, nodes, turns, replicas, self.sequence_parallel)

    @property
    def zero3(self) -> bool:
        """True if DeepSpeed shards the parameters. TRL then checkpoints a model with an adapter by
        reentry."""
        return self.shards_parameters and self.deepspeed

    @property
    def fsdp(self) -> bool:
        """True if torch's FSDP shards the model."""
        return self.shards_parameters and not self.deepspeed
