"""Memory and time of drawing answers token by token, with the keys and values of earlier tokens in a cache.

Counted from the code that runs: flytune/rollouts/sampling.py, and transformers' DynamicCache. No published
run was compared. The time of vLLM is fitted to its published speeds.
"""

import math
from dataclasses import replace

from training_estimates import activations
from training_estimates.accelerators import Accelerator
from training_estimates.communication import gathered_bytes, link_rate
from training_estimates.flops import attention_seconds, head_shape, layers_seconds, product_seconds
from training_estimates.kernels import (
    LAUNCH_SECONDS,
    adapter_bytes,
    dequantization_bytes,
    launches,
    layer_bytes,
    memory_seconds,
)
from training_estimates.workload import BYTES, Decoding, Workload

CACHE_PASSES = 3
"""Times that a token moves the cache: torch.cat reads it and writes it anew, and attention reads it."""
LOGITS_HELD = 30
"""Bytes a vocabulary entry of an answer, at once: logits in 16 bits, and in float32; divided by the
temperature; their log-probabilities; probabilities and their sums in float64 (2 + 4 + 4 + 4 + 8 + 8)."""
LOGITS_MOVED = 52
"""Bytes a vocabulary entry that a drawn token moves: those are written, and their inputs are read."""
DRAWING_LAUNCHES = 25
"""Kernels that choose a token: casts, softmax, sum, search, and the masks of answers that have ended."""


VLLM_TOKEN_SECONDS = 3e-3
"""Fitted. Seconds of vLLM for a token of each answer, beside the bytes through memory and the products."""
VLLM_SPEEDS = {0.494e9: 311.55, 1.544e9: 183.33, 14.77e9: 46.30, 32.76e9: 22.13}
"""Published tokens a second of one answer, by parameters: Qwen2.5 0.5B, 1.5B, 14B and 32B in bfloat16,
prompts of one token, one A100 of 80 GB, vLLM 0.6.3 (QwenLM/Qwen2.5, commit 010c37c3,
docs/source/benchmark/speed_benchmark.rst)."""
VLLM_BAND = (0.88, 1.11)
"""Published over estimated seconds of a token: the ends of these four."""
VLLM_AT_ONCE = 256
"""Answers that vLLM draws together (0.32.0, --max-num-seqs)."""


def cache_bytes(workload: Workload, rows: int, length: float) -> float:
    """Return bytes of the keys and values of `length` tokens of each of `rows` answers, of all layers."""
    sizes = workload.geometry
    # Quantized layers have results in the dtype of their inputs: float32 behind float32 norms.
    dtype = workload.weight_dtype if workload.precision == "pure" else workload.compute_dtype
    width = 4 if workload.kbit_float32 else BYTES[dtype]
    bytes_of_token = 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim * width
    return bytes_of_token * rows * length


def held_bytes(workload: Workload, rows: int) -> dict[str, float]:
    """Return bytes beside weights and states while `rows` answers are drawn together, by component."""
    sizes = workload.geometry
    prompts = activations.count(_prompts_workload(workload, rows))
    cache = cache_bytes(workload, rows, workload.sequence_length)
    return {
        # torch.cat holds those of a layer twice.
        "KV cache": cache + cache / sizes.num_hidden_layers,
        "activations": prompts.working + prompts.stream,
        "logits and loss": float(LOGITS_HELD * rows * sizes.vocab_size),
    }


def seconds(workload: Workload, accelerator: Accelerator) -> float:
    """Return seconds in which one process draws the answers of an optimizer step, all as long as they may
    be."""
    decoding = _decoding(workload)
    if decoding.by_vllm:
        return _seconds_of_vllm(workload, accelerator) + _scoring_seconds(workload, accelerator)
    rows = decoding.at_a_time
    prompts, token = _prompts_workload(workload, rows), _forward_workload(workload, rows, 1)
    cache = cache_bytes(workload, rows, workload.sequence_length - decoding.tokens / 2)
    first = _forward_seconds(prompts, accelerator, attention_seconds(prompts, accelerator))
    later = _forward_seconds(token, accelerator, memory_seconds(CACHE_PASSES * cache, accelerator))
    drawing = math.ceil(decoding.answers / rows) * (first + (decoding.tokens - 1) * later)
    return drawing + (_teacher_seconds(workload, accelerator) if decoding.teacher else 0.0)


def teacher_bytes(workload: Workload) -> float:
    """Return bytes of the frozen model that scores the answers, in the dtype that training computes in."""
    teacher = _decoding(workload).teacher
    assert teacher is not None, "asked only where there is one"
    return float(BYTES[workload.compute_dtype] * teacher.parameters)


def of_teacher(workload: Workload) -> Workload:
    """Return the workload of a forward pass of that model over a micro batch of complete answers."""
    teacher = _decoding(workload).teacher
    assert teacher is not None, "asked only where there is one"
    whole = _forward_workload(workload, workload.micro_batch, workload.sequence_length)
    return replace(
        whole,
        geometry=teacher,
        method="full",
        weight_dtype=workload.compute_dtype,
        precision="pure",
        quantization="none",
        lora_r=0,
        lora_targets=(),
        lora_leaves_out=(),
        lora_ranks=(),
        dora=False,
        token_rows=0,
        frozen=0,
    )


def _teacher_seconds(workload: Workload, accelerator: Accelerator) -> float:
    """Return seconds in which the frozen model scores the answers of an optimizer step."""
    teacher = of_teacher(workload)
    seconds = _forward_seconds(teacher, accelerator, attention_seconds(teacher, accelerator))
    return math.ceil(_decoding(workload).answers / workload.micro_batch) * seconds


def vllm_token_seconds(workload: Workload, accelerator: Accelerator, rows: int, length: float) -> float:
    """Return seconds in which vLLM draws a token of each of `rows` answers that have `length` tokens."""
    token = _forward_workload(workload, rows, 1)
    layers, _, _ = layers_seconds(token, accelerator)
    computing = layers + product_seconds(head_shape(token), accelerator)
    moved = BYTES[workload.compute_dtype] * workload.geometry.parameters + cache_bytes(workload, rows, length)
    return VLLM_TOKEN_SECONDS + max(computing, memory_seconds(moved, accelerator))


def _seconds_of_vllm(workload: Workload, accelerator: Accelerator) -> float:
    decoding = _decoding(workload)
    answers = decoding.served or decoding.answers
    rows = min(answers, VLLM_AT_ONCE)
    prompts = _prompts_workload(workload, rows)
    first = _forward_seconds(prompts, accelerator, attention_seconds(prompts, accelerator))
    length = workload.sequence_length - decoding.tokens / 2
    later = vllm_token_seconds(workload, accelerator, rows, length)
    return math.ceil(answers / rows) * (first + (decoding.tokens - 1) * later)


def _scoring_seconds(workload: Workload, accelerator: Accelerator) -> float:
    """Return seconds in which the trained model scores what vLLM has drawn."""
    decoding = _decoding(workload)
    answers = _forward_workload(workload, decoding.at_a_time, workload.sequence_length)
    seconds = _forward_seconds(answers, accelerator, attention_seconds(answers, accelerator))
    return math.ceil(decoding.answers / decoding.at_a_time) * seconds


def _forward_seconds(workload: Workload, accelerator: Accelerator, attention: float) -> float:
    """Return seconds of a forward pass and of the tokens that are drawn from it, one of each answer.

    Args:
        attention: seconds of attention in the pass.
    """
    rows, sizes = workload.micro_batch, workload.geometry
    layers, _, _ = layers_seconds(workload, accelerator)
    _, hidden, outputs = head_shape(workload)
    moved = (
        sizes.num_hidden_layers * layer_bytes(workload).forward
        + adapter_bytes(workload).forward
        + LOGITS_MOVED * rows * outputs
    )
    # Without recomputation two passes of a training step unpack the weights.
    moved += dequantization_bytes(workload) / 2
    if workload.method != "full":
        moved += 4 * workload.lora_parameters
    computing = (
        layers
        + product_seconds((rows, hidden, outputs), accelerator)
        + attention
        + memory_seconds(moved, accelerator)
    )
    # Kernels of a training step are those of three passes.
    waits = (launches(workload) / 3 + DRAWING_LAUNCHES) * LAUNCH_SECONDS
    # Parameters that are sharded are gathered for each token.
    return max(computing, waits, gathered_bytes(workload) / link_rate(workload, accelerator))


def _prompts_workload(workload: Workload, rows: int) -> Workload:
    """Return the workload of the forward pass over the prompts of `rows` answers."""
    return _forward_workload(workload, rows, max(1, workload.sequence_length - _decoding(workload).tokens))


def _forward_workload(workload: Workload, rows: int, length: int) -> Workload:
    """Return the workload of a forward pass over `length` tokens of each of `rows` answers."""
    return replace(
        workload,
        micro_batch=rows,
        sequence_length=length,
        sequences_per_row=1,
        checkpointing="none",
        decoding=None,
    )


def _decoding(workload: Workload) -> Decoding:
    assert workload.decoding is not None, "asked only where answers are drawn"
    return workload.decoding
