"""Kernels around the matrix products of a step: their bytes through GPU memory, and their number.

Bytes are counted from the code that runs, and from the derivatives of its operations (torch's
derivatives.yaml): each kernel reads its inputs and writes its result; 2 bytes a number, 4 where the code
computes in float32. Where several operations take a tensor, backward adds their gradients up, each in a
kernel that reads two and writes one.
"""

from training_estimates.accelerators import Accelerator
from training_estimates.flops import recomputes
from training_estimates.framework import FUSED_ADAPTERS, AdapterKernels, Kernels, Passes
from training_estimates.workload import BYTES, Workload

BANDWIDTH_SHARE = 0.78
"""Fitted. Share of `memory_gbs` that these kernels reach."""
LAUNCH_SECONDS = 17e-6
"""Fitted. Time that Python, autograd and CUDA take to start one kernel; the GPU waits where its kernels are
shorter."""
ZERO3_HOOK = 18
"""Fitted. Kernels that could start in the time of DeepSpeed's hooks around a module, which fetch its weights
and drop them."""

GPTQ_BYTES = 20.0
"""A weight and pass: AutoGPTQ's torch code shifts, masks, subtracts zeros and scales in a kernel each
(QuantLinear.forward)."""
FOUR_BIT_BYTES = 2.5
"""A weight and pass: half a byte read, a 16-bit number written (bitsandbytes, dequantize_blockwise)."""
INT8_BYTES = 13.0
"""A weight and backward pass: a byte read, a float32 written, and scaled in place (bitsandbytes,
MatMul8bitLt.backward)."""
INT8_INPUT, INT8_RESULT = 9.0, 12.0
"""Bytes of each number of an 8-bit product's float32 input (cast to 16 bits, then to 8) and of its result
(32-bit integers, scaled to float32)."""


QUANTIZED_LAUNCHES = {
    "none": 0,
    "nf4": 2,
    "fp4": 2,
    "nf4_double": 4,
    "fp4_double": 4,
    "int8": 8,
    "gptq4": 5,
}
"""Kernels beside each product. gptq4: fitted, of the ten in its code. 8 bits: two casts, quantization,
the search for outliers (3), their two products."""

_GATED = Passes(4 + 6, 6 + 12)
"""silu, and the product of gate and up; backward the gradient of either, and of silu."""
EAGER = Kernels(norm=Passes(36, 84 + 6 + 9), rotary=Passes(20, 30), activation=_GATED, launches=45)
"""transformers' Llama. The norm casts to float32, squares, averages, scales, casts back and weighs (2+4, 4+4,
4, 4+4, 4+2, 2+2); backward goes through weight (4), cast (6), scale (8), its factor (12+4), average (4),
square (8+8+12), the sum of both ways to the input (12) and the cast (6). rotate_half negates and joins, two
products and a sum follow (2+4+8+6); backward fills and adds slices instead of joining."""
EAGER_FLOAT32 = Kernels(
    norm=Passes(28 + 15, 76 + 12 + 33), rotary=Passes(46, 66), activation=_GATED, launches=60
)
"""The same after prepare_model_for_kbit_training: the norm casts no more, but each product casts its input to
16 bits (five of 4+2 a layer), the rotation computes in float32, and its results are cast (4+2)."""
FUSED = Kernels(norm=Passes(4, 6 + 6 + 9), rotary=Passes(4, 4), activation=_GATED, launches=18)
"""One kernel a norm and one for the rotation (Liger, fms-acceleration's FOAK)."""
COMPILED = Kernels(norm=Passes(4, 11), rotary=Passes(4, 4), activation=Passes(6, 10), launches=12)
"""torch.compile: one kernel a norm and one for the activation, which add gradients up themselves."""
NORM_WEIGHT = 8
"""Bytes per hidden_size of the gradient of the weight of a norm of single operations: product (6), sum
(2)."""

RESIDUAL = Passes(12 + 8, 8)
"""Bytes for each number of hidden_size: two additions, and queries, keys, values and result laid out for
attention."""
ROUTED = Passes(16, 32)
"""Bytes for each number of hidden_size and expert of a token: tokens are gathered for each expert, and its
results weighed and added (index_add_)."""
SCORES = Passes(32, 36)
"""Bytes for each head and pair of tokens where scores are stored (transformers' eager_attention_forward), in
16 bits and in 32. Forward: the product, times the scale, plus the mask, in float32, softmax, the next
product; backward: the gradient of each but the mask."""

ADAMW_NUMBERS = {"fused": 7, "foreach": 20, "for_loop": 20}
"""Numbers read or written for each parameter: fused reads gradient, weight and both moments and writes three;
foreach makes nine passes over two to four of them (torch.optim.adamw)."""
CLIPPING_NUMBERS = 3
"""Norm, then scaling in place."""


DORA_WEIGHT_BYTES = 24
"""Bytes through memory a number of an adapted weight, for its norms: B A (4), its copy (6), the sum (8), its
norm (6)."""
DORA_OUTPUT_BYTES = 28
"""Bytes through memory a number of an adapted output: two products with magnitudes in float32, their sum, and
the output's."""


def kernels(workload: Workload) -> Kernels:
    """Return the kernels around the matrix products, by model and framework."""
    if workload.compiled:
        return COMPILED
    if workload.framework.kernels is not None:
        return workload.framework.kernels
    if workload.framework.fused_kernels:
        return FUSED
    return EAGER_FLOAT32 if workload.kbit_float32 else EAGER


def layer_bytes(workload: Workload) -> Passes:
    """Return bytes through memory of a mean layer's passes over one micro batch, without adapters."""
    geometry, layer_kernels = workload.geometry, kernels(workload)
    hidden = geometry.hidden_size
    turned = (geometry.num_attention_heads + geometry.num_key_value_heads) * geometry.head_dim
    dense = geometry.dense_layers / geometry.num_hidden_layers
    width: float = geometry.intermediate_size * geometry.experts_per_token + geometry.shared_intermediate_size
    width = (1 - dense) * width + dense * geometry.dense_intermediate_size
    routed = geometry.experts_per_token * (1 - dense) if geometry.experts > 1 else 0.0
    counts: list[tuple[Passes, float]] = [
        (layer_kernels.norm, 2 * hidden),
        (layer_kernels.rotary, turned),
        (layer_kernels.activation, width),
        (RESIDUAL, hidden),
    ]
    if workload.attention == "eager":
        counts.append((SCORES, geometry.num_attention_heads * workload.sequence_length))
    moved = Passes.sum([*counts, (ROUTED, routed * hidden)])
    if workload.method == "full" and layer_kernels in (EAGER, EAGER_FLOAT32):
        moved = Passes(moved.forward, moved.backward + 2 * hidden * NORM_WEIGHT)
    return Passes(workload.tokens * moved.forward, workload.tokens * moved.backward)


def adapter_kernels(workload: Workload) -> AdapterKernels:
    """Return the kernels of LoRA: fused by torch.compile, and by fused kernels only on a quantized base
    (FOAK)."""
    framework = workload.framework
    if workload.compiled or (framework.fused_adapters and workload.quantization != "none"):
        return FUSED_ADAPTERS
    return framework.pure_adapters if workload.precision == "pure" else framework.adapters


def adapter_bytes(workload: Workload) -> Passes:
    """Return bytes through memory of all layers' adapters over one micro batch."""
    if workload.method == "full":
        return Passes(0.0, 0.0)
    passes = adapter_kernels(workload)
    taken, given = (
        workload.tokens
        * sum(layer.count * layer.share * getattr(layer, width) for layer in workload.adapted_layers)
        for width in ("rows", "columns")
    )
    # W is read and W + B A written in a forward pass; backward reads the gradient of W + B A twice.
    moved = 2.0 * BYTES[workload.compute_dtype] * sum(linear.parameters for linear in workload.folded)
    if workload.dora:
        # B A is written and cast, added to the weight, squared and summed; outputs are scaled and added in
        # float32.
        moved += DORA_WEIGHT_BYTES * sum(linear.parameters for linear in workload.adapted)
        moved += (
            DORA_OUTPUT_BYTES
            * workload.tokens
            * sum(linear.count * linear.columns * linear.share for linear in workload.adapted)
        )
    return Passes.sum([(passes.inputs, taken), (passes.outputs, given), (Passes(1, 2), moved)])


def dequantization_bytes(workload: Workload) -> float:
    """Return bytes through memory of dequantizing all layers' weights in one micro batch, all passes; of
    8-bit products, of quantizing their inputs and scaling their results too."""
    passes = 3 if recomputes(workload) else 2
    if workload.quantization != "int8":
        width = {"none": 0.0, "gptq4": GPTQ_BYTES}.get(workload.quantization, FOUR_BIT_BYTES)
        return passes * width * workload.geometry.quantizable_parameters
    quantized = [linear for linear in workload.geometry.linears if linear.quantizable]
    moved = sum(
        product.count * (INT8_INPUT * product.rows + INT8_RESULT * product.columns) * product.share
        for product in quantized
    )
    return INT8_BYTES * workload.geometry.quantizable_parameters + (passes - 1) * workload.tokens * moved


def optimizer_bytes(workload: Workload, shards: int) -> float:
    """Return bytes through memory of one optimizer step on one GPU, for its share of the parameters."""
    numbers = ADAMW_NUMBERS[workload.optimizer.implementation] + CLIPPING_NUMBERS
    return workload.trained / shards * numbers * workload.updated_bytes


def launches(workload: Workload) -> float:
    """Return the number of kernels of one micro batch, all passes."""
    geometry = workload.geometry
    layers, grouped = geometry.num_hidden_layers, geometry.groups_experts
    linears = sum(linear.count for linear in geometry.linears if not linear.is_experts) + layers * grouped
    count = layers * kernels(workload).launches
    count += sum(layer.count for layer in workload.adapted_layers) * (
        8 if not workload.framework.fused_adapters else 4
    )
    count += (
        sum(linear.count for linear in geometry.linears if linear.quantizable)
        * QUANTIZED_LAUNCHES[workload.quantization]
    )
    if geometry.experts > 1:
        # Kernels of an expert, one after the other, or of all together (transformers, integrations/moe.py).
        count += (layers - geometry.dense_layers) * 20 * (1 if grouped else geometry.experts)
    if workload.layout.zero3:
        count += ZERO3_HOOK * (linears + 2 * layers)
    return count * (4 if recomputes(workload) else 3)


def memory_seconds(moved: float, accelerator: Accelerator) -> float:
    """Return seconds of kernels that only move `moved` bytes."""
    return moved / (accelerator.memory_gbs * 1e9 * BANDWIDTH_SHARE)
