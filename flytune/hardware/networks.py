"""Networks between nodes: what pods need for each, and its bandwidth."""

import math
from dataclasses import dataclass, field
from typing import Literal

from flytune.hardware.cluster import Cluster

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
