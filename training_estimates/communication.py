"""Communication between GPUs and with the host, and the time of the optimizer's update on either."""

from training_estimates.accelerators import Accelerator
from training_estimates.flops import recomputes
from training_estimates.kernels import ADAMW_NUMBERS, memory_seconds, optimizer_bytes
from training_estimates.model_states import PACKED, States
from training_estimates.workload import BYTES, Workload

LINK_SHARE = 0.8
"""Share of a link's data-sheet rate that NCCL's rings reach. Published runs of nccl-tests: 200 and 208 of 300
GB/s inside a node of A100 (its issues 149 and 178), 85 to 96 of 100 GB/s between nodes (issue 119)."""
PCIE_SHARE = 0.8
"""Share of the slot's rate that copies from pinned memory reach (25 of 32 GB/s, CUDA's bandwidthTest)."""
HOST_MEMORY_GBS = 200.0
"""Memory bandwidth of a node for AdamW on its CPUs: eight channels of DDR4-3200 have 205 GB/s."""
NVME_GBS = 5.0
"""Bandwidth of a node's NVMe disk, reading and writing: a PCIe 4.0 drive's data sheet has 5 to 7."""


def shards(workload: Workload) -> int:
    """Return the number of GPUs that optimizer states are divided among."""
    return workload.degrees.shards if workload.layout.shards_optimizer else 1


def communication_bytes(workload: Workload) -> tuple[float, float]:
    """Return bytes that one GPU sends over the slowest link: (in each micro batch, in each optimizer step).

    A ring over n GPUs sends (n - 1) / n of the bytes for an all-gather or a reduce-scatter, twice that for an
    all-reduce (Rajbhandari et al. 2020, §7, has the sums for ZeRO).
    """
    layout, share = workload.layout, _ring_share(workload)
    gradients = float(workload.trained * _gradient_bytes(workload))
    if layout.shards_parameters:
        gathers = (2 if layout.gathers_in_backward else 1) + workload.frozen_passes
        return share * (gathers * _weight_bytes(workload) + gradients), 0.0
    if layout.shards_gradients:
        return share * gradients, share * 2 * workload.trained
    return 0.0, share * 2 * gradients


def replicated_seconds(workload: Workload, accelerator: Accelerator) -> float:
    """Return seconds in each micro batch in which groups of GPUs add up their gradients: an all-reduce of
    each GPU's shard with those of the other groups, of which a node's GPUs make several at once."""
    degrees = workload.degrees
    if degrees.replicas == 1:
        return 0.0
    sent = 2 * (1 - 1 / degrees.replicas) * workload.trained * _gradient_bytes(workload) / degrees.shards
    rate = accelerator.link_gbs
    if workload.nodes > 1:
        rings = min(degrees.shards, degrees.processes)
        rate = min(rate, accelerator.network_gbs / rings, workload.network_gbs / rings)
    return sent / (rate * 1e9 * LINK_SHARE)


def exchanged_seconds(workload: Workload, accelerator: Accelerator) -> float:
    """Return seconds in each micro batch in which GPUs that divide samples exchange positions for heads
    around attention, while nothing else is computed.

    Of n GPUs each sends (n - 1) / n of its queries, keys, values and results: in each forward pass, and as
    gradients in backward (Jacobs et al. 2023, §3.2). Before and after, they are copied in another order.
    """
    sizes, parts = workload.geometry, workload.degrees.sequence_parallel
    if parts == 1:
        return 0.0
    width = 2 * (sizes.num_attention_heads + sizes.num_key_value_heads) * sizes.head_dim
    passes = (3 if recomputes(workload) else 2) * sizes.num_hidden_layers
    moved = passes * float(workload.tokens * width * BYTES[workload.compute_dtype])
    sent = (1 - 1 / parts) * moved / (accelerator.link_gbs * 1e9 * LINK_SHARE)
    return sent + memory_seconds(4 * moved, accelerator)


def gathered_bytes(workload: Workload) -> float:
    """Return the bytes that one GPU sends while the parameters are gathered once; none where they are not
    sharded."""
    return _ring_share(workload) * _weight_bytes(workload) if workload.layout.shards_parameters else 0.0


def reduced_bytes(workload: Workload) -> float:
    """Return the bytes of sharded gradients among those that one GPU sends in each micro batch."""
    if not workload.layout.shards_gradients:
        return 0.0
    return _ring_share(workload) * workload.trained * _gradient_bytes(workload)


def _ring_share(workload: Workload) -> float:
    """Return the share of the bytes that one GPU sends in an all-gather or a reduce-scatter."""
    return 1 - 1 / workload.degrees.shards


def _weight_bytes(workload: Workload) -> float:
    """Return bytes of the full model, as it is gathered and as a host holds it."""
    quantizable = workload.geometry.quantizable_parameters
    width = 2.0 if workload.quantization in ("none", "gptq4") else PACKED[workload.quantization]
    return width * quantizable + 2 * (workload.geometry.parameters - quantizable)


def _gradient_bytes(workload: Workload) -> int:
    """Return bytes of one number of the gradients as they are reduced."""
    if workload.framework.reduces_stored_dtype and workload.method == "full":
        return BYTES[workload.weight_dtype]
    return 4 if workload.framework.fsdp_reduces_float32 and workload.layout.fsdp else 2


def link_rate(workload: Workload, accelerator: Accelerator) -> float:
    """Return bytes a second that one GPU sends to those that it shares states with: NCCL's rings use all
    network devices of a node at once."""
    rate = accelerator.link_gbs
    if workload.nodes > 1 and workload.degrees.processes % workload.degrees.shards:
        rate = min(rate, accelerator.network_gbs, workload.network_gbs)
    return rate * 1e9 * LINK_SHARE


def pcie_rate(accelerator: Accelerator) -> float:
    """Return bytes a second between a GPU and its host."""
    return accelerator.pcie_gbs * 1e9 * PCIE_SHARE


def host_bytes(workload: Workload) -> float:
    """Return bytes that one GPU exchanges with its host in each micro batch."""
    geometry, moved = workload.geometry, 0.0
    if workload.offload != "none":
        keeps_weights = workload.layout.deepspeed and workload.layout.parameters_on == "none"
        passes = 2 if workload.layout.gathers_in_backward and not keeps_weights else 0
        moved += (passes * _weight_bytes(workload) + 2 * workload.trained) / shards(workload)
    if workload.checkpointing == "offloaded":
        # Out in forward, and back in backward.
        moved += 2 * 2.0 * workload.tokens * geometry.hidden_size * geometry.num_hidden_layers
    return moved


def optimizer_seconds(workload: Workload, accelerator: Accelerator, lasting: States) -> float:
    """Return seconds of the update, on the GPU or on the host; `lasting` are the workload's model states."""
    if workload.optimizer_on == "none":
        seconds = memory_seconds(optimizer_bytes(workload, shards(workload)), accelerator)
        resident = sum(lasting.resident.values())
        if not workload.optimizer.in_backward:
            resident += lasting.gradients
        if workload.optimizer.paged and lasting.paged + resident > workload.gpu_memory_gib * 2**30:
            # Every page is fetched and put back in each step: the next page is never one that was used
            # recently.
            seconds += 2 * lasting.paged / pcie_rate(accelerator)
        return seconds
    trained = workload.trained / shards(workload) * workload.degrees.processes
    width = 4 if workload.layout.deepspeed else BYTES[workload.weight_dtype]
    seconds = trained * ADAMW_NUMBERS["fused"] * width / (HOST_MEMORY_GBS * 1e9)
    if workload.optimizer_on == "nvme":
        # Master copy and both moments are read and written.
        seconds += trained * 2 * 12 / (NVME_GBS * 1e9)
    return seconds
