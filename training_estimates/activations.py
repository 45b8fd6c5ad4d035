"""Memory of activations: tensors kept for backward, and temporaries of backward, counted from the code of the
layers.

A tensor counts where autograd keeps it: inputs of matrix products whose weights are trained, inputs of the
elementwise functions, q, k, v and output of an attention that does not store its scores. Letters in comments:
h hidden size, a width of the query heads, k of the key heads, i of the MLP, V vocabulary; c bytes of the
compute dtype, s of the residual stream.
"""

from dataclasses import dataclass

from training_estimates.workload import BYTES, Workload

LAYER_NORM_TYPES = ("mpt", "phi", "gpt_neox", "starcoder2")
"""Model types whose norms are torch's LayerNorm: one kernel, which keeps its input."""
_CAPPED = ("gemma2", "vaultgemma")
"""Model types that keep the tanh of scores too, which limits them."""

LOSS_VOCABULARY, LOSS_TOKENS = 32768, 4096
"""Vocabulary entries and, on a GPU, tokens of a tile (trl/trainer/utils.py, _CHUNKED_LOGPROB_CHUNK_SIZE;
trl/kernels/chunked_logprob.py, TOKEN_CHUNK_SIZE)."""
_FOUR_BITS = ("nf4", "nf4_double", "fp4", "fp4_double")
CPU_LOSS_BYTES = 33
"""Bytes per number of a tile: in backward eight in float32, and a byte that marks the target
(_backward_tile)."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one micro batch on one GPU."""

    stream: float
    """Input of one layer, which is all that a checkpointed layer keeps."""
    kept: float
    """Tensors that one layer keeps for backward, but for its input where it is recomputed."""
    working: float
    """Temporaries while backward is in a layer."""
    loss: float
    """Peak of last norm, head and loss."""


def stream_bytes(workload: Workload) -> int:
    """Return the bytes of one number of the residual stream.

    peft's prepare_model_for_kbit_training makes norms and embeddings float32, and so the stream; a frozen
    16-bit base under autocast stays in 16 bits, float32 weights of embeddings make it float32.
    """
    if workload.weight_dtype == "float32" and workload.precision == "autocast":
        return 4
    if workload.kbit_float32:
        return 4
    if (
        workload.precision == "autocast"
        and "embedding" in workload.lora_targets
        and workload.framework.float32_copies
    ):
        return 4
    return BYTES[workload.compute_dtype if workload.precision != "pure" else workload.weight_dtype]


def count(workload: Workload) -> Activations:
    """Return the activations of one micro batch."""
    sizes, tokens = workload.geometry, workload.tokens
    stream = stream_bytes(workload)
    compute = BYTES[workload.compute_dtype] if workload.precision != "pure" else BYTES[workload.weight_dtype]
    # Quantized layers have results in the dtype of their inputs: float32 behind float32 norms.
    inside = stream if workload.kbit_float32 else compute
    kept, working = _attention(workload, compute)
    mlp = _mlp(workload, inside)
    for part in (_norms(workload, compute, stream), mlp):
        kept, working = kept + part[0], max(working, part[1])
    stored, backward = _scores(workload, compute)
    # The attention's backward pass follows that of the MLP, which keeps nothing any more.
    kept, working = kept + stored, max(working, backward - mlp[0])
    inputs, products = _eight_bits(workload, compute, stream)
    kept, working = kept + inputs, max(working, products)
    kept += _four_bits(workload, compute)
    adapters = _adapter_inputs(workload, compute) + _dora_outputs(workload, compute)
    gradient = float((stream + compute) * sizes.hidden_size)
    if inside > compute and workload.quantization != "int8":
        # Most is held when the gradients of the product have become float32: the last adapter's input and the
        # output's 16-bit gradient, from which they are computed, are free by then.
        gradient = stream * sizes.hidden_size - _product_input(workload, compute)
    folded = _folded_weights(workload, compute)
    return Activations(
        stream=tokens * stream * sizes.hidden_size,
        kept=tokens * (kept + adapters) + folded,
        # The gradient of the sum of weight and adapter has the size of the weight.
        working=tokens * (working + gradient) + _dora_weights(workload, compute) + folded,
        loss=tokens * _loss(workload, compute, stream)
        + _tiles(workload)
        + (2 + compute) * quantized_head(workload),
    )


def _fused_norms(workload: Workload) -> bool:
    return workload.geometry.model_type in LAYER_NORM_TYPES or workload.framework.fused_kernels


def _norms(workload: Workload, compute: int, stream: int) -> tuple[float, float]:
    hidden = workload.geometry.hidden_size
    # Fused: the input. Eager RMSNorm: a float32 copy of it, and the factor of the trained weight.
    of_weights = compute if workload.method == "full" else 0
    kept_bytes = stream if _fused_norms(workload) else 4 + of_weights
    # Where weights behind the norm are trained, its output is their input.
    kept_bytes += of_weights
    norms = 1 if workload.geometry.model_type == "phi" else 2
    # An input in float32 needs no copy, and the first norm's is the layer's.
    shared = 4 if stream == 4 and workload.checkpointing != "none" and not _fused_norms(workload) else 0
    return float((norms * kept_bytes - shared) * hidden), 0.0


def _attention(workload: Workload, compute: int) -> tuple[float, float]:
    sizes = workload.geometry
    query = sizes.num_attention_heads * sizes.head_dim
    # Attention kernels without grouped heads get keys and values repeated to the width of the queries.
    key = sizes.num_key_value_heads * sizes.head_dim if workload.attention == "flash" else query
    kept = compute * (2 * query + 2 * key)
    # Gradients of q, k and v.
    return float(kept), float(compute * (query + 2 * key))


def _scores(workload: Workload, compute: int) -> tuple[float, float]:
    """Return bytes per token of an attention that stores its scores (transformers' eager_attention_forward):
    kept are the softmax in float32, and in a 16-bit compute dtype; in its backward pass the latter is free,
    and the gradients of the softmax and of its input are there in float32."""
    if workload.attention != "eager":
        return 0.0, 0.0
    softmax = 4 if compute == 4 else 4 + compute
    kept = softmax + compute * (workload.geometry.model_type in _CAPPED)
    pairs = workload.geometry.num_attention_heads * workload.sequence_length
    return float(kept * pairs), float((12 - softmax) * pairs)


def scores_bytes(workload: Workload) -> float:
    """Return the bytes of the scores of one layer without gradients, where an attention stores them: 16-bit
    scores, the same in float32, and their softmax."""
    if workload.attention != "eager":
        return 0.0
    pairs = workload.tokens * workload.geometry.num_attention_heads * workload.sequence_length
    return pairs * (8.0 if BYTES[workload.compute_dtype] == 4 else 10.0)


def _mlp(workload: Workload, compute: int) -> tuple[float, float]:
    sizes = workload.geometry
    full = workload.method == "full"
    # Gated: gate, its activation, up, and for the weight of down their product. Else: up, and its activation.
    held = (3 if sizes.gated else 1) + full
    # Gradients of product, activation and up (of activation and up); the product's memory is free by then.
    computed = (3 if sizes.gated else 2) - full
    if sizes.experts == 1:
        return float(compute * sizes.intermediate_size * held), float(
            compute * sizes.intermediate_size * computed
        )
    # A token goes through several experts; each gathers its input and scatters its output. Backward handles
    # one at a time.
    several, dense = sizes.experts_per_token, sizes.dense_layers / sizes.num_hidden_layers
    kept: float = several * compute * (sizes.intermediate_size * held + 2 * sizes.hidden_size)
    kept += compute * sizes.shared_intermediate_size * held
    kept = (1 - dense) * kept + dense * compute * sizes.dense_intermediate_size * held
    routed = several / sizes.experts * sizes.intermediate_size
    widest = max(routed, sizes.shared_intermediate_size, sizes.dense_intermediate_size)
    return float(kept), float(compute * widest * computed)


def _adapter_inputs(workload: Workload, compute: int) -> float:
    """Return bytes per token of adapted layers' inputs: PEFT casts and drops out for each adapter
    separately."""
    if workload.method == "full":
        return 0.0
    layers = workload.geometry.num_hidden_layers
    inputs: dict[str, float] = {}
    for layer in workload.adapted_layers:
        inputs[layer.name] = inputs.get(layer.name, 0.0) + layer.rows * layer.count * layer.share / layers
    if workload.framework.shared_adapter_inputs:
        # Adapters in the dtype of the base; one dropped-out copy of an input and its mask.
        input_of = {"q": "x", "k": "x", "v": "x", "gate": "m", "up": "m"}
        shared = {input_of.get(name, name): rows for name, rows in inputs.items()}
        return float(sum(rows * (compute + compute + 1) for rows in shared.values()))
    return sum(inputs.values()) * _copy_bytes(workload, compute)


def _copy_bytes(workload: Workload, compute: int) -> int:
    """Return the bytes that a PEFT adapter keeps of each number of its input.

    Of float32 adapters a float32 copy, or 16 bits under autocast; DeepSpeed's are in 16 bits. And the mask of
    dropout: a byte on a GPU, on a CPU a number of the copy's dtype (ATen/native/Dropout.cpp).
    """
    copy = 4 if workload.precision == "pure" and not workload.layout.deepspeed else compute
    if not workload.adapter_dropout:
        return copy
    return copy + (copy if workload.on_cpu else 1)


def _product_input(workload: Workload, compute: int) -> float:
    """Return bytes per token that the adapter of the MLP's last layer keeps of its input."""
    numbers = sum(
        layer.rows * layer.count * layer.share for layer in workload.adapted_layers if layer.name == "down"
    )
    return numbers / workload.geometry.num_hidden_layers * _copy_bytes(workload, compute)


def _folded_weights(workload: Workload, compute: int) -> float:
    """Return bytes of one layer's expert weights with their adapters added (PEFT's ParamWrapper), which
    backward needs.

    A product reads their sum, and not the weight; the factors are there in the dtype of the weight too.
    Layers that are not recomputed are taken for equal: those without experts keep less.
    """
    sizes = workload.geometry
    layers = sizes.num_hidden_layers - (sizes.dense_layers if workload.checkpointing != "none" else 0)
    factors = sum(
        workload.rank(linear) * linear.count * (linear.rows + linear.columns) for linear in workload.folded
    )
    return compute * (sum(linear.parameters for linear in workload.folded) + factors) / max(1, layers)


def quantized_head(workload: Workload) -> int:
    """Return the numbers of a head that is quantized, with 4 bits; 0 where it is not."""
    if workload.quantization not in _FOUR_BITS or not workload.framework.quantizes_head:
        return 0
    return workload.geometry.table_parameters


def _four_bits(workload: Workload, compute: int) -> float:
    """Return bytes per token that the 4-bit layers of a mean layer keep: their inputs, where the library
    keeps them."""
    if workload.quantization not in _FOUR_BITS or not workload.framework.keeps_quantized_inputs:
        return 0.0
    sizes = workload.geometry
    norms = 1 if sizes.model_type == "phi" else 2
    return float(
        compute
        * (norms * sizes.hidden_size + sizes.num_attention_heads * sizes.head_dim + sizes.intermediate_size)
    )


def _eight_bits(workload: Workload, compute: int, stream: int) -> tuple[float, float]:
    """Return bytes per token that 8-bit layers keep, their inputs, and the most that one holds beside its
    result.

    bitsandbytes keeps inputs in the dtype that they come in (MatMul8bitLt): the norms' in that of the stream,
    the product's in the MLP too, attention's in the compute dtype. A product has an input in 8 bits and a
    result in 32 (int8_scaled_mm).
    """
    if workload.quantization != "int8":
        return 0.0, 0.0
    sizes = workload.geometry
    query = sizes.num_attention_heads * sizes.head_dim
    products = [linear for linear in sizes.linears if linear.quantizable]
    kept = (
        stream * (2 * sizes.hidden_size + sizes.intermediate_size * sizes.experts_per_token) + compute * query
    )
    return float(kept), float(max((product.rows + 4 * product.columns for product in products), default=0))


def _dora_outputs(workload: Workload, compute: int) -> float:
    """Return bytes per token that DoRA keeps of adapted layers' outputs, the base's and the adapter's, for
    the magnitudes."""
    if not workload.dora:
        return 0.0
    layers = workload.geometry.num_hidden_layers
    return (
        2.0
        * compute
        * sum(linear.columns * linear.count * linear.share for linear in workload.adapted)
        / layers
    )


def _dora_weights(workload: Workload, compute: int) -> float:
    """Return bytes of the largest adapted weight's change while DoRA computes its norms.

    An identity matrix of its inputs, float32; the change in the adapter's dtype and in that of the inputs;
    the sum with the weight, and its squares.
    """
    if not workload.dora or not workload.adapted:
        return 0.0
    return max(
        4.0 * linear.rows * linear.rows + (4 + 3 * compute) * linear.rows * linear.columns
        for linear in workload.adapted
    )


def _tiles(workload: Workload) -> float:
    """Return bytes of logits that TRL's chunked loss holds at a time; on a GPU in 16 bits, and reduced in
    place."""
    loss, width = workload.framework.loss, min(workload.outputs, LOSS_VOCABULARY)
    if not loss.tiles:
        return 0.0
    if workload.on_cpu:
        return float(CPU_LOSS_BYTES * min(workload.tokens, loss.cpu_tokens) * width)
    # Where all logits are kept, no tile is made on a GPU.
    return (
        0.0
        if loss.per_word
        else float(BYTES[workload.compute_dtype] * min(workload.tokens, LOSS_TOKENS) * width)
    )


def _loss(workload: Workload, compute: int, stream: int) -> float:
    sizes, loss = workload.geometry, workload.framework.loss
    # The last norm: its output, and its input (fused) or a float32 copy.
    of_input = stream if _fused_norms(workload) else 4
    norm = of_input + compute if loss.keeps_norm else 0
    has_several = workload.micro_batch * workload.sequences_per_row > 1
    word = loss.per_word + (loss.shift_per_word if has_several else 0)
    return float(sizes.hidden_size * (norm + loss.per_hidden) + workload.outputs * word)
