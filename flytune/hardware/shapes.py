"""Hardware shapes: one row of shapes.yaml is one kind of machine, and one train task in the console."""

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from flytune import limits
from flytune.files import SETTINGS
from flytune.hardware.cluster import Cluster
from flytune.schema import Strict
from flytune.written_files import load_rows

NetworkName = Literal["tcp", "efa", "infiniband"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A value of `network` in shapes.yaml."""

    gbs: float = math.inf
    """Upper limit of a node's bandwidth, GB/s (1e9 bytes), one direction; inf: the accelerator's network_gbs
    holds."""
    device: str | None = None
    """Kubernetes resource of one device; None: cluster.yaml's infiniband_resource."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of pods."""
    locks_memory: bool = False
    """True if containers need the capability IPC_LOCK."""
    has_devices: bool = True
    """True if pods request devices of it; such networks connect only nodes of one zone."""

    def resource(self, cluster: Cluster) -> str:
        """Return the Kubernetes resource of one device."""
        return self.device or cluster.infiniband_resource


NETWORKS: dict[NetworkName, Network] = {
    # A pod has one interface, and a network card of Amazon EC2's machines has 100 Gbit/s (p4d.24xlarge has
    # four of them, 400 Gbit/s together). NCCL may be slower over TCP: 15 to 22 of 32 Gbit/s between nodes of
    # 8 GPUs (NVIDIA/nccl, issue 209).
    "tcp": Network(gbs=12.5, has_devices=False),
    # Huge pages make forks fail (data loaders), and nodes would have to reserve them.
    "efa": Network(
        device="vpc.amazonaws.com/efa", environment={"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"}
    ),
    # NCCL_NET: without it, NCCL uses sockets where it finds no device, and says so only in its log.
    "infiniband": Network(environment={"NCCL_NET": "IB"}, locks_memory=True),
}
"""All networks, by their name in shapes.yaml."""


SHAPES_FILE = SETTINGS / "shapes.yaml"
GIB = 2**30


class Shape(Strict):
    """Machines of one run: `nodes` equal pods."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,62}$")]
    accelerator: Annotated[str, Field(min_length=1, max_length=100)]
    """`cpu`, or the GPU's name as recipes spell it."""
    nodes: Annotated[int, Field(ge=1, le=limits.SHARDS)] = 1
    processes: Annotated[int, Field(ge=1, le=limits.SHARDS)]
    """Processes of a node: one for each GPU; on a cpu shape, gloo ranks."""
    gpu_memory_gib: Annotated[float, Field(ge=0, le=limits.GIB)] = 0.0
    """Memory of one GPU; 0 on a cpu shape."""
    bf16: bool = True
    """True if the accelerator computes in bfloat16 (not before NVIDIA's Ampere)."""
    cpu: Annotated[int, Field(ge=1, le=limits.COUNT)]
    memory_gib: Annotated[int, Field(ge=1, le=limits.GIB)]
    """Host memory of a node, /dev/shm included."""
    shared_memory_gib: Annotated[int, Field(ge=1, le=limits.GIB)]
    """The memory-backed /dev/shm of a node."""
    disk_gib: Annotated[int, Field(ge=1, le=limits.GIB)]
    """Scratch disk of a node: a pod's /scratch."""
    nvme: bool = False
    """True if that disk is NVMe, as offload to NVMe requires."""
    disk_read_gbs: Annotated[float | None, Field(gt=0, le=limits.RATE)] = None
    """GB/s (1e9 bytes) at which the node reads that disk; if not set, a published rate of NVMe, or a likely
    one of others."""
    price_per_hour: Annotated[float, Field(ge=0, le=limits.PRICE)]
    """US dollars for one node."""
    spot: bool = False
    """True if pods may run on preemptible machines; a label of such nodes in `node_labels` ensures that they
    do."""
    network: NetworkName = "tcp"
    """Network that NCCL uses between nodes (networks.py)."""
    network_devices: Annotated[int, Field(ge=0, le=limits.SHARDS)] = 0
    """EFA or InfiniBand devices that a pod requests."""
    node_labels: dict[str, str] = Field(default={})
    """Labels of the nodes that the pods must run on, beside the accelerator's."""
    retries: Annotated[int, Field(ge=0, le=limits.RETRIES)] = 3
    """Number of attempts after the first of each task with the row's pods; preemptions and other failures
    that another attempt can overcome use them."""
    interruptions_per_hour: Annotated[float | None, Field(ge=0, le=limits.RATE)] = None
    """Interruptions of all nodes together; if not set, a likely rate of such machines."""

    @model_validator(mode="after")
    def _devices_for_a_network(self) -> Self:
        if NETWORKS[self.network].has_devices != (self.network_devices > 0):
            raise ValueError(
                f"network: {self.network} with network_devices: {self.network_devices}; only tcp has none"
            )
        return self

    @model_validator(mode="after")
    def _memory_of_a_process(self) -> Self:
        if self.is_gpu and self.gpu_memory_gib <= 0:
            raise ValueError(
                f"gpu_memory_gib: {self.gpu_memory_gib:g}: an {self.accelerator:.40} has memory; write its "
                "GiB"
            )
        if self.shared_memory_gib >= self.memory_gib:
            raise ValueError(
                f"shared_memory_gib: {self.shared_memory_gib}: it is a part of memory_gib, "
                f"{self.memory_gib}, and must be less"
            )
        return self

    @property
    def is_gpu(self) -> bool:
        return self.accelerator != "cpu"

    @property
    def fabric(self) -> Network:
        """The network between its nodes."""
        return NETWORKS[self.network]

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes

    @property
    def total_price_per_hour(self) -> float:
        """US dollars an hour for all nodes."""
        return self.nodes * self.price_per_hour

    @property
    def one_node(self) -> Self:
        """One of its machines by itself, without a network."""
        return self.model_copy(update={"nodes": 1, "network": "tcp", "network_devices": 0})

    @property
    def identifier(self) -> str:
        """The name as part of a Python identifier."""
        return self.name.replace("-", "_")


class Shapes(Strict):
    """The content of shapes.yaml."""

    shapes: Annotated[list[Shape], Field(min_length=1, max_length=limits.LISTED)]


@cache
def load_shapes(path: Path = SHAPES_FILE) -> tuple[Shape, ...]:
    """Return all rows, cheapest first.

    Raises:
        RecipeError: the file is missing, or has mistakes, which are all listed; a name occurs twice.
    """
    shapes = load_rows(path, Shapes, "shapes", because="; a name is a task in the console")
    return tuple(sorted(shapes, key=lambda shape: (shape.total_price_per_hour, shape.world_size, shape.name)))
