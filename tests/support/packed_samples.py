"""Packed samples compared with the same samples alone, on a tiny model of any type: losses, gradients, other
neighbors."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from flytune.data import Collator
from flytune.models.scoring import IGNORED
from tests.support.model_types import VOCABULARY, tiny_config

LENGTH = 64
"""Tokens of a packed row."""
EQUAL, DIFFERENT = 1e-7, 1e-3
"""Largest distance of equal ones, smallest of different ones: of losses in nats, of gradients relative to
their norm.

All is computed in float64, with its rounding of some 1e-14: in float32 the verdict would be that of one CPU's
kernels.
"""
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
"""The third is computed by a stand-in for FlashAttention's kernels, which run on a GPU only."""


class Undecided(Exception):
    """Error of a distance that is neither that of equal samples nor that of different ones."""


NONE_SUCH = "transformers has no such attention for it"


def row(*documents: list[int]) -> dict[str, list[int]]:
    """Return documents as one packed row, trained on all tokens: the labels of first tokens too, which the
    collator drops."""
    ids = [token for document in documents for token in document]
    return {"input_ids": ids, "labels": list(ids), "seq_lengths": [len(document) for document in documents]}


def alone(document: list[int]) -> dict[str, list[int]]:
    """Return a document as a row of its own, with the labels that a packed row has for it."""
    return {"input_ids": document, "labels": [IGNORED, *document[1:]]}


def tiny_model(model_type: str, attention: str, config: Any = None) -> Any:
    """Return a random model of that type, in training with activation checkpointing; None where it has no
    such attention."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    built = "eager" if attention == "flash_attention_2" else attention
    config = config or tiny_config(model_type)
    try:
        with double():
            model = AutoModelForCausalLM.from_config(
                config or tiny_config(model_type), attn_implementation=built, dtype=torch.float64
            )
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        return None
    if attention == "flash_attention_2" and not getattr(model, "_supports_flash_attn", False):
        return None
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # Large weights: what a token attends to must show in the loss.
            torch.nn.init.normal_(parameter, std=0.15)
    for module in model.modules():
        if attention == "flash_attention_2" and hasattr(module, "config"):
            module.config._attn_implementation = attention
    model.double().train()
    if getattr(model, "supports_gradient_checkpointing", False):
        # Backward computes the layers again, and a mode is off there.
        again = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), double())}
        model.gradient_checkpointing_enable(again)
    return model


def losses(model: Any, batch: dict[str, Any]) -> Any:
    """Return the loss of each trained token, in order."""
    from torch.nn.functional import cross_entropy

    labels = batch.pop("labels")[:, 1:].flatten()
    logits = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, labels, reduction="none")[labels != IGNORED]


@contextmanager
def double() -> Iterator[None]:
    """Compute in float64 within the block, also where a model's code asks for float32, as for its norms and
    softmaxes."""
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers.integrations import moe

    def wide(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    class Double(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            function = torch.Tensor.double if function is torch.Tensor.float else function
            return function(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})

    usual, kernel = torch.get_default_dtype(), moe._can_use_grouped_mm
    torch.set_default_dtype(torch.float64)
    # The kernel of grouped products has no float64; transformers' own loop over the experts has.
    moe._can_use_grouped_mm = lambda *_: False
    try:
        with Double():
            yield
    finally:
        torch.set_default_dtype(usual)
        moe._can_use_grouped_mm = kernel


@contextmanager
def flash_attention_on_cpu() -> Iterator[None]:
    """Let models compute FlashAttention with a stand-in for its kernels within the block."""
    import transformers.integrations.flash_attention as flash

    originals = flash._flash_attention_forward, flash.get_target_dtype
    flash._flash_attention_forward = flash_attention_of_the_cpu
    # In a type which the kernels do not have, transformers looks for a linear layer's dtype, and GPT-2 has no
    # such layer.
    flash.get_target_dtype = lambda query, module: None
    try:
        yield
    finally:
        flash._flash_attention_forward, flash.get_target_dtype = originals


def flash_attention_of_the_cpu(query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    """Compute what the kernels do; samples' borders come from the collator, or from the positions where a
    model drops those."""
    import torch
    from transformers import modeling_flash_attention_utils as flash

    index = torch.arange(query.shape[1])
    seen = index[:, None] >= index
    if options.get("sliding_window"):
        seen &= index[:, None] - index < options["sliding_window"]
    borders = options.get("cu_seq_lens_q")
    if borders is None and flash._is_packed_sequence(options.get("position_ids"), len(query)):
        borders = flash.prepare_fa_kwargs_from_position_ids(options["position_ids"])[0][0]
    if borders is not None:
        sample = torch.bucketize(index, borders[1:], right=True)
        seen &= sample[:, None] == sample
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (options.get("softmax_scale") or query.shape[3] ** -0.5)
    if cap := options.get("softcap"):
        scores = torch.tanh(scores / cap) * cap
    return (scores.masked_fill(~seen, -1e30).softmax(-1) @ value).transpose(1, 2).contiguous()


def problem_of(model_type: str, attention: str, model: Any = None) -> str | None:
    """Return why packed samples are not as samples alone under one kind of attention; None if they are.

    Raises:
        Undecided: a distance lies between those of equal and of different samples.
    """
    try:
        model = model or tiny_model(model_type, attention)
        if model is None:
            return NONE_SUCH
        with flash_attention_on_cpu(), double():
            found = distances(model, flatten=attention == "flash_attention_2")
    except Exception as error:  # noqa: BLE001 (whatever its code raises)
        lines = str(error).splitlines() or [""]
        return f"its code fails on packed rows: {type(error).__name__}: {lines[0][:120]}"
    for problem, distance in found.items():
        # NaN is not within the bound.
        if not distance < DIFFERENT:
            return problem
        if distance > EQUAL:
            raise Undecided(
                f"{model_type} with {attention}: {problem}: {distance:.1e}, neither {EQUAL} nor {DIFFERENT}"
            )
    return None


def distances(model: Any, flatten: bool) -> dict[str, float]:
    """Return how far packed samples are from samples alone, by what is wrong if it is far."""
    import torch

    draw = random.Random(0)
    documents, others = (
        [[draw.randrange(3, VOCABULARY) for _ in range(size)] for size in (20, 31, 17, 40)] for _ in range(2)
    )
    collate = Collator(0, LENGTH, flatten=flatten)
    separate = torch.cat([losses(model, collate([alone(document)])) for document in documents])
    separate.sum().backward()
    gradients = _gradients(model)
    packed = losses(model, collate([row(*documents[:2]), row(*documents[2:])]))
    packed.sum().backward()
    after = _gradients(model)

    # Other neighbors, in front and behind.
    changed = losses(model, collate([row(others[0], documents[1]), row(documents[2], others[3])])).detach()
    kept, packed = slice(19, 19 + 30 + 16), packed.detach()
    follows = not torch.equal(changed[:19], packed[:19]) and bool(packed.isfinite().all())
    found = {"its losses do not follow its tokens": 0.0 if follows else math.inf}
    found["packed samples see each other"] = float((changed[kept] - packed[kept]).abs().max())
    found["packed samples have other losses than alone"] = float((packed - separate.detach()).abs().max())
    distance, norm = math.inf, 1.0
    if gradients.keys() == after.keys():
        norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        distance = float(
            torch.stack([(after[name] - gradient).norm() for name, gradient in gradients.items()]).norm()
        )
    return found | {"packed samples have other gradients than alone": distance / norm}


def _gradients(model: Any) -> dict[str, Any]:
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return gradients
