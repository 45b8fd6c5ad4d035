"""Loss of the model's own logits, where TRL's chunked loss would be another one.

TRL multiplies the last hidden states by the output embedding, and knows five fields of a configuration that
scale or cap the result. A prediction head, caps and multipliers of other names, an adapter on the head, and a
quantized head are not in its product. The functions here take the place of TRL's for such models: with the
same results for each token, and all logits.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from flytune import patches
from flytune.models import model_types
from flytune.models.loading import is_quantized
from flytune.models.scoring import IGNORED

TOKENS = 128
"""Tokens whose logits are in float32 at a time."""


def reason(model: Any, trust_remote_code: bool) -> str | None:
    """Return why the chunked loss of a causal language model, with its adapter, is not its own; None where it
    is."""
    if why := model_types.own_logits(model.config.to_dict(), trust_remote_code):
        return why
    head = model.get_output_embeddings()
    if hasattr(head, "base_layer"):
        return "an adapter on the head"
    if head is None or is_quantized(head) or (is_quantized_model(model) and type(head).__name__ != "Linear"):
        return "a head that is not a plain matrix"
    return None


def is_quantized_model(model: Any) -> bool:
    """Return whether transformers loaded quantized weights."""
    return getattr(model, "hf_quantizer", None) is not None


def add_head(model: Any, trust_remote_code: bool = False, **arguments: Any) -> None:
    """Give a causal language model the head that TRL's trainers call: TRL's, or that of its own logits.

    Args:
        arguments: those of TRL's add_fused_lm_head.
    """
    if reason(model, trust_remote_code):
        _add_own(model, **arguments)
        return
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, **arguments)


def trl_module(trainer_class: Any) -> str:
    """Return the name of the module of the trainer of TRL that a class extends."""
    return next(
        str(base_class.__module__)
        for base_class in trainer_class.__mro__
        if base_class.__module__.startswith("trl.")
    )


@contextmanager
def chosen(trainer_class: Any, trust_remote_code: bool) -> Iterator[None]:
    """Let a trainer of TRL that is made within the block give its models the head of `add_head`."""
    patch = patches.trl.FUSED_HEADS.get(trl_module(trainer_class))
    if patch is None:  # a reward model has no such head
        yield
        return
    with patch.replaced(functools.partial(add_head, trust_remote_code=trust_remote_code)):
        yield


def _add_own(
    model: Any,
    outputs: tuple[str, ...] = ("log_probs",),
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
) -> None:
    """Let a model called with fused_lm_head=True return TRL's FusedCausalLMOutput, of its own logits.

    Args:
        temperature: divisor of the logits.
        cast_lm_head_to_fp32: has no effect, as for TRL's: logits are in float32 after the model's own head.
    """
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Any = None,
        shift_labels: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            return original(*args, **kwargs, **({} if labels is None else {"labels": labels}))
        from torch.nn.functional import pad
        from trl.trainer.utils import FusedCausalLMOutput

        kwargs.pop("num_items_in_batch", None)
        result = original(*args, **kwargs | {"use_cache": False})
        # Position p predicts token p + 1.
        targets = pad(labels[:, 1:], (0, 1), value=IGNORED) if shift_labels is None else shift_labels
        targets = targets.to(result.logits.device)
        logits = result.logits if temperature == 1.0 else result.logits / temperature
        results = _of_tokens(logits, targets.clamp(min=0), outputs)
        if shift_labels is None:
            targets, results = targets[:, :-1], {name: values[:, :-1] for name, values in results.items()}
        mask = targets != IGNORED
        results = {name: values.masked_fill(~mask, 0) for name, values in results.items()}
        loss = -results["log_probs"].sum() / mask.sum().clamp(min=1)
        balance = getattr(result, "aux_loss", None)
        if balance is None and kwargs.get("output_router_logits"):
            balance = loss.new_zeros(
                ()
            )  # asked for by the configuration, and computed by no code of the model
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=balance, **results)

    patches.trl.OWN_FORWARD.on(model, MethodType(forward, model))


def _of_tokens(logits: Any, targets: Any, outputs: tuple[str, ...]) -> dict[str, Any]:
    """Return TRL's results for each token that a position predicts, float32 of shape (rows, length).

    Args:
        logits: (rows, length, vocabulary).
        targets: (rows, length).
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    parts: list[dict[str, Any]] = []
    tiles = zip(logits.flatten(0, 1).split(TOKENS), targets.flatten().split(TOKENS), strict=True)
    for tile, wanted in tiles:
        # The float32 logits are computed again in the backward pass.
        parts.append(
            checkpoint(_of_tile, tile, wanted, outputs, use_reentrant=False, preserve_rng_state=False)
        )
    return {name: torch.cat([part[name] for part in parts]).view(logits.shape[:2]) for name in parts[0]}


def _of_tile(logits: Any, targets: Any, outputs: tuple[str, ...]) -> dict[str, Any]:
    import torch

    logits = logits.float()
    total = logits.logsumexp(dim=-1)
    values = {"log_probs": logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - total}
    with torch.no_grad():  # for the log alone, as TRL's trainers use them
        if "entropy" in outputs:
            values["entropy"] = total - ((logits - total.unsqueeze(-1)).exp() * logits).nan_to_num().sum(
                dim=-1
            )
        if "log_sum_sq_probs" in outputs:
            values["log_sum_sq_probs"] = (2 * (logits - total.unsqueeze(-1))).logsumexp(dim=-1)
        if "mean_logits" in outputs:
            values["mean_logits"] = logits.mean(dim=-1)
        if "is_top1" in outputs:
            values["is_top1"] = logits.argmax(dim=-1) == targets
    return values
