"""Time of an optimizer step by part, and tokens a second."""

from dataclasses import dataclass, replace

from training_estimates import decoding, intervals, model_states, towers
from training_estimates.accelerators import Accelerator
from training_estimates.communication import (
    communication_bytes,
    exchanged_seconds,
    gathered_bytes,
    host_bytes,
    link_rate,
    optimizer_seconds,
    pcie_rate,
    reduced_bytes,
    replicated_seconds,
)
from training_estimates.flops import (
    ATTENTION_BACKWARD,
    attention_seconds,
    dora_flops,
    flops,
    folded_seconds,
    folding_flops,
    head_shape,
    input_gradients_seconds,
    layers_seconds,
    product_seconds,
    recomputes,
    routed_adapters,
)
from training_estimates.kernels import (
    LAUNCH_SECONDS,
    adapter_bytes,
    adapter_kernels,
    dequantization_bytes,
    launches,
    layer_bytes,
    memory_seconds,
)
from training_estimates.workload import Workload

HIDDEN_SHARE = 0.25
"""Fitted. Share of overlapped communication that costs no time: NCCL's kernels take processors and memory
bandwidth from the computation."""
ADAPTER_SHARE = 0.5
"""Assumed. Share of the rate of matrix products that LoRA's narrow matrices reach; they are few
operations."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step on one GPU, by part; `hidden` costs no time and is not in the sum."""

    forward: float
    recomputation: float
    backward: float
    """Matrix products and attention, as in the two above."""
    adapters: float
    kernels: float
    """Norms, activations, logits and loss, which memory bandwidth bounds."""
    dequantization: float
    launching: float
    """Time that the GPU waits for the CPU to start its kernels."""
    communication: float
    """Communication that does not overlap with computation."""
    hidden: float
    offload: float
    optimizer: float
    data: float
    """Fetching and collating batches, which the Trainer does between steps."""
    tokens: int
    """Tokens in one optimizer step of one GPU."""
    utilization: float
    """MFU: operations that the model requires (recomputation excluded) over the data sheet's rate."""
    drawing: float = 0.0
    """Drawing the answers that are trained, each as long as it may be."""

    @property
    def computing(self) -> float:
        parts = (
            self.forward,
            self.recomputation,
            self.backward,
            self.adapters,
            self.kernels,
            self.dequantization,
        )
        return sum(parts) + self.launching

    @property
    def seconds(self) -> float:
        return self.computing + self.communication + self.offload + self.optimizer + self.data + self.drawing

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of one GPU."""
        return self.tokens / self.seconds


def step(workload: Workload, accelerator: Accelerator, states: model_states.States | None = None) -> StepTime:
    """Return the time of one optimizer step, from its operations and bytes and the rates of the accelerator.

    Args:
        states: the workload's model states, if they are at hand.
    """
    computing = _computing(workload, accelerator)
    micro = sum(computing.values())
    waits = launches(workload) * LAUNCH_SECONDS
    # Where experts are modules, the CPU waits for the GPU's assignment of tokens to experts, and the GPU then
    # for the CPU.
    is_asked = workload.geometry.experts > 1 and not workload.geometry.groups_experts
    computing["launching"] = waits if is_asked else max(0.0, waits - micro)
    micro += computing["launching"]

    repeated, once = communication_bytes(workload)
    exchanged = exchanged_seconds(workload, accelerator)
    link = repeated / link_rate(workload, accelerator) + replicated_seconds(workload, accelerator)
    link += exchanged
    host = host_bytes(workload) / pcie_rate(accelerator)
    beside = link + host
    # Without overlap_comm, backward waits for the reduction of its gradients.
    waited = 0.0 if workload.layout.overlaps else reduced_bytes(workload) / link_rate(workload, accelerator)
    if not workload.framework.prefetches and workload.layout.gathers_in_backward:
        # Behind the reduction of a unit's gradients, the next unit's parameters are asked for when it is
        # reached.
        waited += gathered_bytes(workload) / link_rate(workload, accelerator)
    waited += exchanged
    hidden = beside - waited
    # Copies between GPU and host are made by engines of their own, and take nothing from the computation.
    slowed, excess = (1 - HIDDEN_SHARE) * min(link - waited, micro), max(0.0, hidden - micro)
    share = (link - waited) / hidden if hidden else 0.0
    communication, offload = waited + slowed + excess * share, excess * (1 - share)

    times = workload.accumulation
    # GPUs that take turns share the same tokens.
    processes = workload.degrees.gpus_per_process
    needed = flops(workload).needed
    time = StepTime(
        **{name: times * seconds for name, seconds in computing.items()},
        communication=times * communication + once / link_rate(workload, accelerator),
        hidden=times * (beside - communication - offload),
        offload=times * offload,
        optimizer=optimizer_seconds(workload, accelerator, states or model_states.of(workload)),
        data=workload.framework.data_seconds * times * workload.tokens,
        tokens=times * workload.tokens // processes,
        utilization=0.0,
        drawing=decoding.seconds(workload, accelerator) if workload.decoding else 0.0,
    )
    return replace(time, utilization=times * needed / processes / time.seconds / (accelerator.tflops * 1e12))


def _computing(workload: Workload, accelerator: Accelerator) -> dict[str, float]:
    """Return seconds of one micro batch, by part of StepTime."""
    again = recomputes(workload)
    passes = 4 if again else 3
    # Passes of the reference are without an adapter: all but its products are those of a pass of layers.
    with_reference = passes + workload.frozen_passes
    layers, recomputed, weights = layers_seconds(workload, accelerator)
    attention = attention_seconds(workload, accelerator)
    head = product_seconds(head_shape(workload), accelerator)
    full = workload.method == "full"
    narrow = 2 * routed_adapters(workload) * workload.tokens + folding_flops(workload)
    narrow /= 1e12 * (
        accelerator.float32_tflops
        if adapter_kernels(workload).float32
        else ADAPTER_SHARE * accelerator.matmul_tflops
    )
    # Forward passes: recomputation and those of the reference are further ones.
    layer, adapters = layer_bytes(workload), adapter_bytes(workload)
    moved = workload.geometry.num_hidden_layers * ((with_reference - 2) * layer.forward + layer.backward)
    moved += (passes - 2) * adapters.forward + adapters.backward
    moved += workload.framework.loss.moved_per_word * workload.tokens * workload.outputs
    forward = (with_reference - passes + 1) * (layers + attention + head)
    tower = towers.seconds(workload, accelerator)
    return {
        "forward": forward + tower.forward,
        "recomputation": (recomputed + attention if again else 0.0) + tower.recomputation,
        "backward": input_gradients_seconds(workload, accelerator, layers)
        + head
        + ATTENTION_BACKWARD * attention
        + (weights if full else folded_seconds(workload, accelerator))
        + head * workload.trains_head
        + tower.backward,
        # Norms have no gradients; the product with the inputs that are left has those of the inputs alone.
        "adapters": 0.0
        if full
        else passes * narrow
        + (passes - 1) * dora_flops(workload) / (ADAPTER_SHARE * accelerator.matmul_tflops * 1e12),
        "kernels": memory_seconds(moved, accelerator),
        "dequantization": with_reference
        / passes
        * memory_seconds(dequantization_bytes(workload), accelerator),
    }


def likely(workload: Workload, time: StepTime, is_calibrated: bool = False) -> tuple[float, float]:
    """Return tokens a second of one GPU between which nine of ten measured runs are, by the measured
    errors."""
    band = intervals.speed(workload, is_calibrated)
    return band.low * time.tokens_per_second, band.high * time.tokens_per_second
