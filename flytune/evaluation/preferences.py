"""Accuracy and margin of held-out pairs: which of two answers each model prefers."""

from typing import Any

from flytune.models import bootstrap
from flytune.records import Preference


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
    return Preference(pairs=pairs, beta=beta, **found)
