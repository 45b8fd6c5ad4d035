"""Likeness of a server's next tokens to a trained model's: how far they are from it, and what else they look
like."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flytune.models.probe import HALF, Answers

Kind = Literal["trained", "base", "scaled", "rounded", "other"]
"""Likeness of answers: to the trained model, its base, its adapter at another scale, a rounded build of it,
or another model."""
_SCALES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.5, 2.0)
"""Scales of an adapter that are compared, in units of the trained one; 0 is the base."""
_NEARER, _MUCH_NEARER = 0.8, 0.5
"""Distance to another model, as a share of that to the trained one, below which answers look like the other:
where they are within the bound of the trained model, and where they are not. Rounding alone leaves it above
1."""
_LEAST = -100.0
"""Log-probability of a token that a model does not have, and of all less likely ones."""
_AGREEING, _NEAR = 0.75, 0.25
"""Least share of equal next tokens, and largest distance in standard deviations of the trained model's
logits, of what looks like a rounded build."""


@dataclass(frozen=True)
class Likeness:
    """Comparison of a server's next tokens with those of the trained model."""

    kind: Kind
    scale: float | None
    """Scale of the adapter that the answers look like, in units of the trained one."""
    difference: float
    """Largest difference of a listed log-probability, in nats."""
    prompt: int
    """Prompt of that difference."""
    divergence: float
    """Mean over the prompts of KL(trained || served) in nats per token, of the listed tokens and the rest."""
    agreement: float
    """Share of prompts after which both models predict the same next token."""
    apart: float | None
    """Largest difference of the base's log-probabilities of the same tokens; None where they are not
    recorded."""


def likeness(
    answers: Answers,
    served: Sequence[Mapping[int, float]],
    bound: float,
    of: Literal["difference", "divergence"],
) -> Likeness:
    """Compare the next tokens that a server lists after each prompt with a model's record.

    Args:
        answers: the record of the trained model.
        served: log-probabilities by token, in nats, for each prompt of the record.
        bound: largest difference or divergence of the trained model itself.
        of: which of them is bounded.
    """
    import torch

    ids = [list(tokens) for tokens in served]
    listed = [torch.tensor(list(tokens.values())).double().clamp(min=_LEAST) for tokens in served]
    trained = _picked(answers.logits, ids)
    differences = _largest(trained, listed)
    worst = max(range(len(ids)), key=differences.__getitem__)
    divergence = sum(map(_divergence, trained, listed)) / len(ids)
    likeliest = answers.logits.argmax(dim=-1).tolist()
    best = [max(tokens, key=tokens.__getitem__) for tokens in served]
    agreement = sum(map(int.__eq__, likeliest, best)) / len(ids)
    distances = {scale: _distance(_picked(logits, ids), listed) for scale, logits in _scaled(answers)}
    is_near = (differences[worst] if of == "difference" else divergence) <= bound
    nearest = min(distances, key=distances.__getitem__, default=None)
    share = _NEARER if is_near else _MUCH_NEARER
    scale: float | None = None
    kind: Kind
    if nearest is not None and distances[nearest] < share * _distance(trained, listed):
        kind, scale = ("scaled", nearest) if nearest else ("base", None)
    elif is_near:
        kind = "trained"
    else:
        spread = float(answers.logits.std(dim=-1).mean())
        is_rounded = agreement >= _AGREEING and _distance(trained, listed) <= _NEAR * spread
        kind = "rounded" if is_rounded else "other"
    apart = None if answers.base is None else max(_largest(trained, _picked(answers.base, ids)))
    return Likeness(kind, scale, differences[worst], worst, divergence, agreement, apart)


def _scaled(answers: Answers) -> Iterator[tuple[float, Any]]:
    """Yield scales of the adapter, and the logits (prompts, vocabulary) that it has there.

    They are a parabola through the recorded ones, which are those of scale 0, HALF and 1.
    """
    if answers.base is None:
        return
    start, middle, end = (logits.double() for logits in (answers.base, answers.scaled, answers.logits))
    # The parabola's coefficients, by f(0), f(h) and f(1).
    curve = (HALF * (end - start) - (middle - start)) / (HALF - HALF**2)
    slope = end - start - curve
    for scale in _SCALES:
        yield scale, start + scale * slope + scale**2 * curve


def _picked(logits: Any, ids: Sequence[Sequence[int]]) -> list[Any]:
    """Return the log-probabilities of each prompt's tokens, of which some may be in no vocabulary."""
    import torch

    size = logits.shape[-1]
    picked = []
    for row, tokens in zip(logits.double().log_softmax(dim=-1), ids, strict=True):
        index = torch.tensor(tokens)
        values = row[index.clamp(max=size - 1)].clamp(min=_LEAST)
        picked.append(values.masked_fill(index >= size, _LEAST))
    return picked


def _largest(first: Sequence[Any], second: Sequence[Any]) -> list[float]:
    """Return the largest difference after each prompt, in nats."""
    return [float((mine - other).abs().max()) for mine, other in zip(first, second, strict=True)]


def _distance(first: Sequence[Any], second: Sequence[Any]) -> float:
    """Return the root mean square of all differences, in nats."""
    import torch

    differences = torch.cat(list(first)) - torch.cat(list(second))
    return float(differences.square().mean().sqrt())


def _divergence(trained: Any, served: Any) -> float:
    """Return KL(trained || served) of listed tokens and of all others as one, a lower bound of that of all
    tokens."""
    import torch

    with_rest = []
    for values in (trained, served):
        rest = (1 - values.exp().sum()).clamp(min=1e-9)
        with_rest.append(torch.cat([values, rest.log()[None]]))
    first, second = with_rest
    return float((first.exp() * (first - second)).sum())
