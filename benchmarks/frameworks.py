"""Frameworks, losses and layouts of published runs, beside those that Flytune has."""

from collections.abc import Mapping
from dataclasses import replace

from flytune.planning.workloads import FLYTUNE
from flytune.sharding import SHARDINGS
from training_estimates import AdapterKernels, Framework, Loss
from training_estimates.framework import CHUNKED, Passes
from training_estimates.layout import Layout

HF = Loss(per_word=2 + 4 + 4, shift_per_word=4, moved_per_word=48)
"""transformers since 4.46 (loss/loss_utils.py): 16-bit logits are held, float32 copy, shifted copy,
log-softmax. Bandwidth: cast to float32, shifts, log_softmax, and all of the way back (6+8+8+12+8+6)."""
HF_4_45 = replace(HF, per_word=4 + 4)
"""transformers up to 4.45: `logits = logits.float()` frees the 16-bit ones."""
FOAK = Loss(per_word=2 + 4, shift_per_word=4, moved_per_word=6)
"""fms-acceleration's cross entropy writes the gradient over the shifted copy; its fused kernel reads logits
once."""
FOAK_4_45 = replace(FOAK, per_word=4)
LIGER = Loss(per_hidden=2 + 6, moved_per_word=8)
"""Liger's fused loss: the hidden states' gradient, and a chunk of T/ceil(V/h) tokens, so V of its logits are
h of all; 16 bits and a float32 copy (liger_kernel/ops/fused_linear_cross_entropy.py)."""
QWEN = Loss(per_word=2 + 4 + 4, shift_per_word=2, moved_per_word=48)
"""Qwen 1's own code shifts in 16 bits, and autocast makes cross entropy float32."""
QWEN_ZERO = replace(QWEN, per_word=2 + 2 + 2)
"""Qwen 1 under DeepSpeed, which has no autocast: log-softmax and the gradients of both in 16 bits."""
COMPOSER_LOGITS = Loss(per_word=2 + 2, moved_per_word=28)
"""llm-foundry (ComposerMPTCausalLM, loss_fn: fused_crossentropy): logits in 16 bits, and their gradient."""
LITGPT_CHUNKED = Loss(per_word=2 + 2 + 2 + 2, moved_per_word=24)
"""litgpt's chunked_cross_entropy: logits of all tokens in chunks, log-softmax in their dtype, and gradients
of both."""
TORCHTUNE_CHUNKED = Loss(per_word=2 + (4 + 4 + 2) / 8, moved_per_word=24)
"""torchtune's CEWithChunkedOutputLoss: all logits in 16 bits; compiled, one chunk of 8 has float32 copies and
a gradient."""
FLOAT32_LOGITS = replace(HF, moved_per_word=28)
"""Cross entropy of float32 logits without the shifts."""

TRANSFORMERS = Framework(
    loss=HF,
    # The input is cast (2+4) and read (4); B's result is written (4), scaled (8), added to the layer's
    # (2+4+4), cast (4+2). Backward: A's two products (4+4), the cast (6), the sum (6); both casts (6+6), the
    # scale (8), B's two products (4+4).
    pure_adapters=AdapterKernels(inputs=Passes(10, 20), outputs=Passes(28, 28), float32=True),
    # accelerate/accelerator.py, "upcasted low precision parameters".
    upcasts=True,
    # gradient_checkpointing passed use_reentrant=True by default before 5.0.
    reentrant=True,
    data_seconds=FLYTUNE.data_seconds,
)
"""transformers' Trainer, since 4.46."""
TRANSFORMERS_4_45 = replace(TRANSFORMERS, loss=HF_4_45)
COMPOSER = Framework(
    loss=COMPOSER_LOGITS,
    # Fitted: MPT's Triton kernel.
    attention_share=0.52,
    reduces_stored_dtype=True,
)
"""Composer, as llm-foundry runs it; it keeps the dtype of the weights that it was given."""
LITGPT = Framework(
    loss=LITGPT_CHUNKED,
    float32_adapters=False,
    shared_adapter_inputs=True,
    # "No sharding benefit" in litgpt's own notes.
    gathers_adapters=True,
    # Fabric's plugin takes the place of torch.nn.Linear; the releases of that time ask for bitsandbytes 0.41
    # or 0.42.
    quantizes_head=True,
    keeps_quantized_inputs=True,
)
TORCHTUNE = Framework(loss=TORCHTUNE_CHUNKED, float32_adapters=False, shared_adapter_inputs=True)
# All in 16 bits, behind a dropout (2+2+1). Its train.py has backward_prefetch=None.
_PLAIN_ADAPTERS = AdapterKernels(inputs=Passes(7, 15), outputs=Passes(12, 8))
FSDP_QLORA = Framework(
    loss=HF, adapters=_PLAIN_ADAPTERS, pure_adapters=_PLAIN_ADAPTERS, float32_adapters=False, prefetches=False
)
"""AnswerDotAI's fsdp_qlora; it checkpoints inside of FSDP's units, without reentrance."""
TORCH = Framework(loss=HF)
"""FSDP1 without a framework and without mixed precision, as LambdaLabs' guide used it when its figures were
measured."""

_LOSSES: Mapping[str, Loss] = {
    "hf": HF,
    "fp32_logits": FLOAT32_LOGITS,
    "chunked": CHUNKED,
    "foak": FOAK,
    "liger": LIGER,
}
_OWN: list[tuple[Framework, dict[str, Loss]]] = [
    (TRANSFORMERS_4_45, {"hf": HF_4_45, "foak": FOAK_4_45}),
    (COMPOSER, {"fp32_logits": COMPOSER_LOGITS}),
    (LITGPT, {"chunked": LITGPT_CHUNKED}),
    (TORCHTUNE, {"chunked": TORCHTUNE_CHUNKED}),
]


def with_loss(framework: Framework, name: str) -> Framework:
    """Return a framework with another loss: hf, fp32_logits, chunked, foak or liger; foak fuses adapters
    too."""
    own = next((losses for known, losses in _OWN if known == framework), {})
    kernels = {"fused_kernels": name in ("foak", "liger"), "fused_adapters": name == "foak"}
    return replace(framework, loss=own.get(name, _LOSSES[name]), **kernels)


_FSDP2 = SHARDINGS["fsdp"].estimated_as
_FSDP1 = replace(_FSDP2, name="fsdp1")
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        *(kind.estimated_as for kind in SHARDINGS.values()),
        _FSDP1,
        replace(_FSDP1, name="fsdp1_grad_op", gathers_in_backward=False),
        replace(_FSDP2, name="fsdp2_grad_op", gathers_in_backward=False),
    )
}
"""All layouts of published runs, by name. grad_op: parameters stay gathered from forward to backward
(SHARD_GRAD_OP)."""
