"""Figures of preferences: which of two answers to one prompt, or with two labels, each model prefers."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from flytune.models import Row
from flytune.models.scoring import RESAMPLES
from flytune.objectives.heldout import HeldoutFigures, HeldoutRows, ModelScores, Sides, exact, intervals
from flytune.recipe import Recipe
from flytune.records import Interval


class PairRows(HeldoutRows):
    """Pairs: both answers are scored, and the chosen ones describe a model."""

    answers = "chosen"
    has_reference = True

    def figures(self, base: ModelScores, tuned: ModelScores) -> HeldoutFigures:
        return of_pairs(base.nll, tuned.nll, self.recipe.objective.reward_scale, base.reference)


class LabelledRows(HeldoutRows):
    """Labelled answers: the desirable ones describe a model, or the undesirable ones where there are no
    others."""

    def __init__(self, recipe: Recipe, rows: Sequence[Row], tokenizer: Any) -> None:
        super().__init__(recipe, rows, tokenizer)
        self.desirable = sum(row["label"] for row in rows)
        self.answers = "desirable" if self.desirable else "undesirable"

    @property
    def described(self) -> int:
        return self.desirable or len(self.rows)

    def by_sequence(self, of_rows: Sequence[str]) -> list[str]:
        if not self.desirable:
            return list(of_rows)
        return [value for value, row in zip(of_rows, self.rows, strict=True) if row["label"]]

    def left_out(self) -> dict[str, int]:
        return {"undesirable answers": len(self.rows) - self.described}

    def figures(self, base: ModelScores, tuned: ModelScores) -> HeldoutFigures:
        if not 0 < self.desirable < len(self.rows):
            return HeldoutFigures({}, base.tokens, {})
        return of_labelled(
            base.nll, tuned.nll, base.tokens, self.desirable, self.recipe.objective.reward_scale
        )


def of_pairs(base: Any, tuned: Any, beta: float, reference: Any = None) -> HeldoutFigures:
    """Return the figures of pairs.

    The reward of an answer is beta times the difference of its log-probability, tuned minus reference
    (Rafailov et al. 2023, eq. 5); the rewards of the reference, mostly the base, are all 0.

    Args:
        base, tuned: negative log-likelihood of each sequence in nats, shape (2 x pairs,): those of the chosen
        answers, then
            those of the rejected ones (models.scoring.sequences_of).
        beta: the recipe's objective.beta.
        reference: the same of the reference, where it is not the base.
    """
    import numpy

    pairs = len(base) // 2
    margins = [nll[pairs:] - nll[:pairs] for nll in (base, tuned, base if reference is None else reference)]
    reward = beta * (margins[1] - margins[2])
    rewards = {
        "preference_loss": numpy.logaddexp(0.0, -reward),
        "reward_accuracy": reward > 0,
        "reward_margin": reward,
    }
    preferred = {"base": margins[0] > 0, "tuned": margins[1] > 0}
    preferred["difference"] = preferred["tuned"].astype(float) - preferred["base"]
    weights = numpy.ones(pairs, dtype=int)
    by_name = intervals(rewards | preferred, weights)
    figures = {name: {"tuned": by_name[name]} for name in rewards} | {
        "chosen_preferred": {name: by_name[name] for name in preferred}
    }
    return HeldoutFigures(
        figures, weights, {name: rewards[name] for name in ("preference_loss", "reward_accuracy")}
    )


def of_labelled(base: Any, tuned: Any, tokens: Any, desirable: int, beta: float) -> HeldoutFigures:
    """Return the figures of labelled answers; a pair is any desirable answer with any undesirable one.

    Their prompts differ, and so do their lengths: log-probabilities are compared for each token. Intervals
    are of a bootstrap that draws the desirable and the undesirable answers apart.

    Args:
        base, tuned: negative log-likelihood of each answer in nats, the desirable ones first
        (models.scoring.sequences_of). tokens: number of scored tokens of each answer. desirable: number of
        desirable answers; neither they nor the others may be none. beta: the recipe's objective.beta.
    """
    import numpy

    reward, undesirable = beta * (base - tuned), len(base) - desirable
    ranked = {
        "accuracy": reward,
        **{name: -nll / numpy.maximum(tokens, 1) for name, nll in (("base", base), ("tuned", tuned))},
    }
    draw = numpy.random.default_rng(0)
    drawn_figures = list[Any]()
    block = max(1, 2**22 // len(base))
    for start in range(-1, RESAMPLES, block):
        # The first row is all answers, each once.
        first = start < 0
        drawn = [
            numpy.vstack(
                [
                    numpy.ones((int(first), size)),
                    draw.multinomial(size, [1 / size] * size, size=block - first),
                ]
            )
            for size in (desirable, undesirable)
        ]
        means = [
            (each @ numpy.stack([part, sign * part > 0], axis=1) / len(part)).T
            for each, part, sign in zip(drawn, (reward[:desirable], reward[desirable:]), (1, -1), strict=True)
        ]
        shares = [
            _share(drawn[0], drawn[1], values[:desirable], values[desirable:]) for values in ranked.values()
        ]
        columns = [*shares, shares[2] - shares[1], means[0][0] - means[1][0], *means[0], *means[1]]
        drawn_figures.append(numpy.stack(columns, axis=1))
    resampled = numpy.concatenate(drawn_figures)
    ends = numpy.percentile(resampled[1:], [2.5, 97.5], axis=0)
    if min(desirable, undesirable) < 2:
        ends[0], ends[1] = -sys.float_info.max, sys.float_info.max
    of = [
        Interval(value=value, low=low, high=high)
        for value, low, high in zip(resampled[0], *ends, strict=True)
    ]
    fewest = min(desirable, undesirable)
    figures: dict[str, Sides] = {
        "reward_accuracy": {"tuned": exact(of[0], fewest)},
        "desirable_preferred": {
            "base": exact(of[1], fewest),
            "tuned": exact(of[2], fewest),
            "difference": of[3],
        },
        "reward_margin": {"tuned": of[4]},
        "desirable_reward": {"tuned": of[5]},
        "desirable_moved": {"tuned": exact(of[6], desirable)},
        "undesirable_reward": {"tuned": of[7]},
        "undesirable_moved": {"tuned": exact(of[8], undesirable)},
    }
    weights = numpy.repeat([0.5 / desirable, 0.5 / undesirable], [desirable, undesirable])
    kernels = {
        "preference_loss": lambda margins: numpy.logaddexp(0.0, -margins),
        "reward_accuracy": lambda margins: (margins > 0).astype(float),
    }
    scores = {
        name: weights * _of_each(reward[:desirable], reward[desirable:], kernel)
        for name, kernel in kernels.items()
    }
    loss = intervals({"preference_loss": scores["preference_loss"]}, weights)["preference_loss"]
    if fewest < 2:
        loss = loss.model_copy(update={"low": -sys.float_info.max, "high": sys.float_info.max})
    return HeldoutFigures({"preference_loss": {"tuned": loss}} | figures, weights, scores)


def _of_each(rewards: Any, others: Any, kernel: Callable[[Any], Any]) -> Any:
    """Return each answer's part in the mean of a kernel of the margins of all pairs, that of `rewards` first,
    then of `others`.

    The parts are those of Hajek's projection, twice as far from the mean as an answer's own mean over its
    pairs: the mean over both labels, each of which counts half, is the mean over the pairs, and varies with
    the drawn answers as that does.
    """
    import numpy

    block = max(1, 2**22 // len(others))
    totals, by_other = numpy.zeros(len(rewards)), numpy.zeros(len(others))
    for start in range(0, len(rewards), block):
        values = kernel(rewards[start : start + block, None] - others[None, :])
        totals[start : start + block] = values.mean(axis=1)
        by_other += values.sum(axis=0) / len(rewards)
    answers = numpy.concatenate([totals, by_other])
    return 2 * answers - totals.mean()


def _share(drawn: Any, others_drawn: Any, values: Any, others: Any) -> Any:
    """Return the share of pairs in which the first value is larger, for each row of counts of both."""
    import numpy

    order = numpy.argsort(others)
    below = numpy.hstack([numpy.zeros((len(others_drawn), 1)), others_drawn[:, order].cumsum(axis=1)])
    smaller = below[:, numpy.searchsorted(others[order], values, side="left")]
    return (drawn * smaller).sum(axis=1) / (len(values) * len(others))
