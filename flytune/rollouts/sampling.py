"""Completions that a language model draws, each by random numbers of its own.

A completion depends on the weights, its prompt and its random numbers alone: not on the other rows of a
batch, on the number of processes or on what was drawn before. The random numbers follow from the run's seed,
the step, the prompt's tokens and the place in the group. In float32 the logits of a row differ by some 1e-6
between batches, so that one draw in about a million may fall on the other side of a border.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flytune.models.scoring import padded


@dataclass(frozen=True)
class Drawing:
    """Settings by which tokens are drawn."""

    ends: tuple[int, ...]
    """Tokens that end a completion."""
    pad: int
    """Token that pads batches; it is masked."""
    temperature: float = 1.0
    """Divisor of the logits; 0 takes the most probable token."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None


class Completion(NamedTuple):
    """Tokens that a model has drawn."""

    tokens: list[int]
    """Drawn tokens, the end marker included."""
    log_probs: list[float]
    """Log-probability of each token, of all logits divided by the temperature."""
    is_truncated: bool
    """True if the most tokens were drawn, and none of them ended it."""
    trained_log_probs: Sequence[float] = ()
    """Log-probability of each token by the trained model, where another engine drew it."""


def key_of(seed: int, step: int, prompt: Sequence[int], index: int) -> int:
    """Return the number of 128 bits from which the random numbers of one completion follow."""
    identity = f"{seed} {step} {index} {' '.join(map(str, prompt))}"
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:16], "big")


def numbers(seed: int, step: int, prompt: Sequence[int], index: int, count: int) -> Any:
    """Return `count` random numbers from 0 to 1 (without 1) of one completion: float64."""
    return numbers_of(key_of(seed, step, prompt, index), count)


def numbers_of(key: int, count: int) -> Any:
    """Return the random numbers of a key, as `numbers`.

    They are Philox's raw output, which numpy guarantees not to change (NEP 19).
    """
    import numpy

    return (numpy.random.Philox(key=key).random_raw(count) >> numpy.uint64(11)) * 2.0**-53


def draw(
    model: Any,
    prompts: Sequence[Sequence[int]],
    uniforms: Sequence[Any],
    drawing: Drawing,
    goes_on: Callable[[bool], bool] = bool,
) -> list[Completion]:
    """Return a completion of each prompt, of at most as many tokens as its random numbers.

    Args:
        model: in evaluation mode; a forward pass of it takes transformers' arguments.
        uniforms: the random numbers of each completion.
        goes_on: returns whether any process still draws, given whether this one does: a forward pass may
            gather parameters, so that all processes must make equally many.
    """
    import torch

    device = next(model.parameters()).device
    inputs = padded([list(prompt) for prompt in prompts], drawing.pad, left=True).to(device)
    mask = padded([[1] * len(prompt) for prompt in prompts], 0, left=True).to(device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    most = torch.tensor([len(uniform) for uniform in uniforms], device=device)
    table = torch.zeros(len(prompts), max(map(len, uniforms)), dtype=torch.float64)
    for place, numbers in enumerate(uniforms):
        table[place, : len(numbers)] = torch.as_tensor(numbers)
    table, ends = table.to(device), torch.tensor(drawing.ends, device=device)
    tokens, log_probs, cache = list[Any](), list[Any](), None
    active = most > 0
    has_ended = torch.zeros_like(active)
    while goes_on(bool(active.any())):
        with torch.no_grad():
            output = model(
                input_ids=inputs,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        cache, logits = output.past_key_values, output.logits[:, -1].float()
        at = min(len(tokens), table.shape[1] - 1)
        token, log_prob = chosen(logits, table[:, at], drawing)
        token = torch.where(active, token, drawing.pad)
        tokens.append(token)
        log_probs.append(log_prob)
        has_ended |= active & torch.isin(token, ends)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        inputs, positions = token[:, None], positions[:, -1:] + 1
        active = active & ~has_ended & (most > len(tokens))
    if not tokens:
        return [Completion([], [], True) for _ in prompts]
    drawn, probabilities = torch.stack(tokens, dim=1).tolist(), torch.stack(log_probs, dim=1).tolist()
    is_end = torch.isin(torch.stack(tokens, dim=1), ends).tolist()
    return [
        _completion(drawn[row][: len(uniforms[row])], probabilities[row], is_end[row])
        for row in range(len(prompts))
    ]


def _completion(tokens: list[int], log_probs: list[float], is_end: list[bool]) -> Completion:
    end = next((at for at in range(len(tokens)) if is_end[at]), None)
    length = len(tokens) if end is None else end + 1
    return Completion(tokens[:length], log_probs[:length], end is None)


def chosen(logits: Any, uniform: Any, drawing: Drawing) -> tuple[Any, Any]:
    """Return the token of each row, and its log-probability.

    Args:
        logits: float32 (rows, vocabulary).
        uniform: float64 (rows,).
    """
    import torch

    if not drawing.temperature:
        token = logits.argmax(dim=-1)
        return token, logits.log_softmax(dim=-1).gather(-1, token[:, None])[:, 0]
    scores = logits / drawing.temperature
    log_probs = scores.log_softmax(dim=-1)
    totals = _warped(scores, drawing).softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    # The first token whose cumulated probability is above the random number: never one of probability 0.
    token = torch.searchsorted(totals, uniform[:, None] * totals[:, -1:], right=True)[:, 0].clamp(
        max=logits.shape[-1] - 1
    )
    return token, log_probs.gather(-1, token[:, None])[:, 0]


def _warped(scores: Any, drawing: Drawing) -> Any:
    """Return scores without the tokens that are not drawn; transformers' warpers do not look at the tokens
    before."""
    from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    before: Any = None
    if drawing.top_k:
        scores = TopKLogitsWarper(drawing.top_k)(before, scores)
    if drawing.top_p < 1:
        scores = TopPLogitsWarper(drawing.top_p)(before, scores)
    if drawing.min_p:
        scores = MinPLogitsWarper(drawing.min_p)(before, scores)
    return scores
