"""Floating-point operations of a step, and the time of matrix products.

A product of (m, k) by (k, n) is 2mkn operations. A decoder with P parameters in linear layers takes 2P of
them a token forward, 2P for the gradients of inputs, 2P for those of weights (Kaplan et al. 2020, §2.1;
Narayanan et al. 2021, appendix); frozen weights have no gradients. Attention's own are 4 x length x width a
token and layer, half of them where it is causal; backward takes 2.5 times as many (FlashAttention-2 computes
the scores again: Dao 2023, §4.1).
"""

from collections import Counter
from dataclasses import dataclass

from training_estimates.accelerators import Accelerator
from training_estimates.workload import Workload

ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward pass over those of its forward pass."""

MEASURED_SIZE = 8192
"""Rows and columns of the matrices by which `matmul_tflops` was measured."""
MATMUL_SHARE = {"GA100": 0.84, "GH100": 0.74}
"""Fitted. Share of the speed of the measured product, without its time for memory, that products of a model's
shapes reach. 1 for chips of which too few runs are published."""
ATTENTION_HALF_LENGTH = 300
"""Tokens at which causal attention has half its speed: FlashAttention-3's paper (arXiv 2407.08608), figure 5,
has FlashAttention-2 at 191, 260, 298, 319, 333 TFLOP/s for 512, 1k, 2k, 4k, 8k tokens."""

Shape = tuple[float, float, float]
"""Shape of one product: rows (tokens), in, out."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of one micro batch on one GPU."""

    forward: float
    recomputation: float
    input_gradients: float
    weight_gradients: float
    adapters: float
    """LoRA's matrices, all passes."""
    scores_again: float
    """The part of `input_gradients` that recomputes attention's scores, as FlashAttention does."""

    @property
    def total(self) -> float:
        return (
            self.forward + self.recomputation + self.input_gradients + self.weight_gradients + self.adapters
        )

    @property
    def needed(self) -> float:
        """Operations that the model requires, without those that repeat others; MFU counts these."""
        return self.total - self.recomputation - self.scores_again


def layer_shapes(workload: Workload) -> Counter[Shape]:
    """Return the products of all decoder layers' forward pass, each with its number; experts share the tokens
    evenly."""
    shapes: Counter[Shape] = Counter()
    for linear in workload.geometry.linears:
        shapes[workload.tokens * linear.share, linear.rows, linear.columns] += linear.count
    return shapes


def head_shape(workload: Workload) -> Shape:
    """Return the product of the head."""
    return float(workload.tokens), workload.geometry.hidden_size, workload.outputs


def attention_flops(workload: Workload) -> float:
    """Return operations of causal attention in one layer's forward pass."""
    width = workload.geometry.num_attention_heads * workload.geometry.head_dim
    return 2.0 * workload.sequence_length * width * workload.tokens


def recomputes(workload: Workload) -> bool:
    """Return whether backward runs the layers' forward pass again."""
    return workload.checkpointing != "none"


def skipped_shape(workload: Workload) -> Shape | None:
    """Return the product that recomputing a layer leaves out, if any.

    Checkpointing without reentry (torch.utils.checkpoint, early_stop) ends once it has the last tensor that
    backward needs: before the layer's last product, whose result is only added. TRL passes use_reentrant=True
    for PEFT under ZeRO-3.
    """
    reentrant = workload.framework.reentrant or (workload.layout.zero3 and workload.method != "full")
    if (
        not recomputes(workload)
        or reentrant
        or "down" in workload.lora_targets
        or workload.geometry.experts > 1
    ):
        return None
    return float(workload.tokens), workload.geometry.intermediate_size, workload.geometry.hidden_size


def flops(workload: Workload) -> Flops:
    """Return the operations of one micro batch on one GPU, by purpose."""
    layers = workload.geometry.num_hidden_layers
    linear = sum(count * 2 * m * k * n for (m, k, n), count in layer_shapes(workload).items())
    head = 2.0 * float(workload.tokens) * workload.geometry.hidden_size * workload.outputs
    attention = layers * attention_flops(workload)
    m, k, n = skipped_shape(workload) or (0, 0, 0)
    full = workload.method == "full"
    passes = 4 if recomputes(workload) else 3
    return Flops(
        forward=linear + head + attention,
        recomputation=linear - layers * 2 * m * k * n + attention if recomputes(workload) else 0.0,
        input_gradients=linear + head + ATTENTION_BACKWARD * attention,
        weight_gradients=linear + head if full else head * workload.trains_head,
        # Forward, the inputs' and the weights' gradients, and again forward where layers are recomputed.
        adapters=0.0
        if full
        else passes * 2.0 * routed_adapters(workload) * workload.tokens
        + (passes - 1) * dora_flops(workload)
        + passes * folding_flops(workload)
        + folded_gradients(workload),
        scores_again=(ATTENTION_BACKWARD - 2) * attention,
    )


def routed_adapters(workload: Workload) -> float:
    """Return the number of adapter parameters that one token passes; those of experts are added to the
    weights instead."""
    layers = sum(
        workload.rank(layer) * layer.count * (layer.rows + layer.columns) * layer.share
        for layer in workload.adapted_layers
    )
    return layers + workload.table_adapters


def folding_flops(workload: Workload) -> float:
    """Return the operations of adding the adapters of experts to their weights once, in all layers.

    PEFT (tuners/lora/layer.py, ParamWrapper) computes W + B A of every expert of a layer, whichever tokens it
    gets; backward has two products of that size, for the gradients of A and B.
    """
    return sum(2.0 * workload.rank(linear) * linear.parameters for linear in workload.folded)


def folded_gradients(workload: Workload) -> float:
    """Return the operations of the gradients of experts' weights, from which those of their adapters are
    computed."""
    return sum(2.0 * workload.tokens * linear.share * linear.parameters for linear in workload.folded)


def dora_flops(workload: Workload) -> float:
    """Return the operations that DoRA adds to a forward pass of all layers (peft/tuners/lora/dora.py).

    The product B A of each adapted weight, for its norms: PEFT sends an identity matrix through both factors.
    And with dropout the product of the weight once more, with the inputs that are left.
    """
    if not workload.dora:
        return 0.0
    again = workload.tokens if workload.adapter_dropout else 0
    return sum(
        2.0
        * linear.count
        * linear.rows
        * (workload.rank(linear) * (linear.rows + linear.columns) + again * linear.columns * linear.share)
        for linear in workload.adapted
    )


def product_seconds(shape: Shape, accelerator: Accelerator) -> float:
    """Return seconds of one 16-bit matrix product: its operations and, not overlapped, reading operands and
    writing the result.

    The second part makes narrow and short products slow: an A100 has half its speed where 1/m + 1/k + 1/n is
    1/118. The time that it took of the measured product is not in the first one again.
    """
    m, k, n = shape
    memory = accelerator.memory_gbs * 1e9
    seconds = max(0.0, 1e-12 / accelerator.matmul_tflops - 3 / MEASURED_SIZE / memory) / MATMUL_SHARE.get(
        accelerator.chip, 1.0
    )
    return 2 * m * k * n * seconds + 2 * (m * k + k * n + m * n) / memory


def layers_seconds(workload: Workload, accelerator: Accelerator) -> tuple[float, float, float]:
    """Return seconds of the matrix products of all layers: forward, recomputation, gradients of weights."""
    forward = weights = 0.0
    for (m, k, n), count in layer_shapes(workload).items():
        forward += count * product_seconds((m, k, n), accelerator)
        weights += count * product_seconds((k, m, n), accelerator)
    skipped = skipped_shape(workload)
    layers = workload.geometry.num_hidden_layers
    if not recomputes(workload):
        return forward, 0.0, weights
    not_again = layers * product_seconds(skipped, accelerator) if skipped else 0.0
    return forward, forward - not_again, weights


def input_gradients_seconds(workload: Workload, accelerator: Accelerator, forward: float) -> float:
    """Return seconds of the products of all layers that give the gradients of inputs: as long as the forward
    pass's.

    Behind 8-bit layers they are in the dtype of the input (bitsandbytes, MatMul8bitLt.backward): in float32
    for all but attention's result, where preparing for k-bit training made norms and embeddings float32.
    """
    if workload.quantization != "int8" or not workload.kbit_float32:
        return forward
    wide = sum(count * 2 * m * k * n for (m, k, n), count in layer_shapes(workload).items())
    return wide / (accelerator.float32_tflops * 1e12)


def folded_seconds(workload: Workload, accelerator: Accelerator) -> float:
    """Return seconds of the gradients of experts' weights, from which those of their adapters are
    computed."""
    folded = ((linear, workload.tokens * linear.share) for linear in workload.folded)
    return sum(
        linear.count * product_seconds((linear.rows, tokens, linear.columns), accelerator)
        for linear, tokens in folded
    )


def attention_seconds(workload: Workload, accelerator: Accelerator) -> float:
    """Return seconds of attention in the forward pass of all layers."""
    rate = accelerator.attention_tflops * 1e12 * workload.framework.attention_share
    length = workload.sequence_length
    rate *= length / (length + ATTENTION_HALF_LENGTH)
    return workload.geometry.num_hidden_layers * attention_flops(workload) / rate
