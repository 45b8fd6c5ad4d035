"""Accuracy and margin of held-out answers: which of two answers to one prompt, or with two labels, each model prefers."""

import sys
from typing import Any

from flytune.models import bootstrap
from flytune.models.scoring import RESAMPLES
from flytune.records import LabelReward, Preference


def preference(base: Any, tuned: Any, beta: float) -> Preference:
    """Return the preferences of both models.

    Args:
        base, tuned: negative log-likelihood of each sequence in nats, shape (2 x pairs,): those of the chosen answers, then
            those of the rejected ones (models.scoring.sequences_of).
        beta: the recipe's objective.beta.
    """
    import numpy

    pairs = len(base) // 2
    margins = [nll[pairs:] - nll[:pairs] for nll in (base, tuned)]
    reward = beta * (margins[1] - margins[0])
    figures = {"accuracy": reward > 0, "margin": reward, "base": margins[0] > 0, "tuned": margins[1] > 0}
    values = numpy.stack([numpy.asarray(value, dtype=float) for value in figures.values()], axis=1)
    points, lows, highs = bootstrap(values, numpy.ones(pairs, dtype=int))
    found = {
        name + end: value[at]
        for end, value in (("", points), ("_low", lows), ("_high", highs))
        for at, name in enumerate(figures)
    }
    return Preference.model_validate({"pairs": pairs, "beta": beta, **found})


def preference_of_labels(base: Any, tuned: Any, tokens: Any, desirable: int, beta: float) -> Preference:
    """Return the preferences of both models between each desirable and each undesirable answer.

    Their prompts differ, and so do their lengths: log-probabilities are compared for each token. Intervals are of a bootstrap
    that draws the desirable and the undesirable answers apart.

    Args:
        base, tuned: negative log-likelihood of each answer in nats, the desirable ones first (models.scoring.sequences_of).
        tokens: number of scored tokens of each answer.
        desirable: number of desirable answers; neither they nor the others may be none.
        beta: the recipe's objective.beta.
    """
    import numpy

    reward, undesirable = beta * (base - tuned), len(base) - desirable
    ranked = {"accuracy": reward, **{name: -nll / numpy.maximum(tokens, 1) for name, nll in (("base", base), ("tuned", tuned))}}
    draw = numpy.random.default_rng(0)
    found = list[Any]()
    block = max(1, 2**22 // len(base))
    for start in range(-1, RESAMPLES, block):
        # The first row is all answers, each once.
        first = start < 0
        drawn = [
            numpy.vstack([numpy.ones((int(first), size)), draw.multinomial(size, [1 / size] * size, size=block - first)])
            for size in (desirable, undesirable)
        ]
        means = [
            (each @ numpy.stack([part, sign * part > 0], axis=1) / len(part)).T
            for each, part, sign in zip(drawn, (reward[:desirable], reward[desirable:]), (1, -1), strict=True)
        ]
        shares = [_share(drawn[0], drawn[1], values[:desirable], values[desirable:]) for values in ranked.values()]
        found.append(numpy.stack([*shares, means[0][0] - means[1][0], *means[0], *means[1]], axis=1))
    resampled = numpy.concatenate(found)
    ends = numpy.percentile(resampled[1:], [2.5, 97.5], axis=0)
    if min(desirable, undesirable) < 2:
        ends[0], ends[1] = -sys.float_info.max, sys.float_info.max
    names = (*ranked, "margin", "reward", "moved", "reward", "moved")
    values = [
        {name: float(resampled[0, at]), f"{name}_low": float(ends[0, at]), f"{name}_high": float(ends[1, at])}
        for at, name in enumerate(names)
    ]
    labels = [
        LabelReward.model_validate({"label": label, "answers": answers, **values[at], **values[at + 1]})
        for label, answers, at in ((True, desirable, 4), (False, undesirable, 6))
    ]
    named = values[0] | values[1] | values[2] | values[3]
    return Preference.model_validate({"pairs": desirable * undesirable, "beta": beta, "labels": labels, **named})


def _share(drawn: Any, others_drawn: Any, values: Any, others: Any) -> Any:
    """Return the share of pairs in which the first value is larger, for each row of counts of both."""
    import numpy

    order = numpy.argsort(others)
    below = numpy.hstack([numpy.zeros((len(others_drawn), 1)), others_drawn[:, order].cumsum(axis=1)])
    smaller = below[:, numpy.searchsorted(others[order], values, side="left")]
    return (drawn * smaller).sum(axis=1) / (len(values) * len(others))
