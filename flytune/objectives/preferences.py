"""Figures of preferences: which of two answers to one prompt, or with two labels, each model prefers."""

import sys
from collections.abc import Callable, Iterator, Sequence
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
            answers, then those of the rejected ones (models.scoring.sequences_of).
        beta: the recipe's objective.beta.
        reference: the same of the reference, where it is not the base.
    """
    import numpy

    pairs = len(base) // 2
    base_margin, tuned_margin, reference_margin = (
        nll[pairs:] - nll[:pairs] for nll in (base, tuned, base if reference is None else reference)
    )
    reward = beta * (tuned_margin - reference_margin)
    scores = {"preference_loss": numpy.logaddexp(0.0, -reward), "reward_accuracy": reward > 0}
    preferred = {"base": base_margin > 0, "tuned": tuned_margin > 0}
    preferred["difference"] = preferred["tuned"].astype(float) - preferred["base"]
    weights = numpy.ones(pairs, dtype=int)
    by_name = intervals(scores | {"reward_margin": reward} | preferred, weights)
    figures = {name: {"tuned": by_name[name]} for name in (*scores, "reward_margin")}
    figures["chosen_preferred"] = {side: by_name[side] for side in preferred}
    return HeldoutFigures(figures, weights, scores)


def of_labelled(base: Any, tuned: Any, tokens: Any, desirable: int, beta: float) -> HeldoutFigures:
    """Return the figures of labelled answers; a pair is any desirable answer with any undesirable one.

    Their prompts differ, and so do their lengths: log-probabilities are compared for each token. Intervals
    are of a bootstrap that draws the desirable and the undesirable answers apart.

    Args:
        base, tuned: negative log-likelihood of each answer in nats, the desirable ones first
            (models.scoring.sequences_of).
        tokens: number of scored tokens of each answer.
        desirable: number of desirable answers; neither they nor the others may be none.
        beta: the recipe's objective.beta.
    """
    import numpy

    reward, undesirable = beta * (base - tuned), len(base) - desirable
    fewest = min(desirable, undesirable)
    log_probs = [-nll / numpy.maximum(tokens, 1) for nll in (base, tuned)]
    blocks = [
        _labelled_means(counts, other_counts, reward, *log_probs)
        for counts, other_counts in _draws(desirable, undesirable)
    ]
    by_name: dict[str, Interval] = {}
    for name in blocks[0]:
        values = numpy.concatenate([means[name] for means in blocks])
        low, high = -sys.float_info.max, sys.float_info.max
        if fewest > 1:
            low, high = numpy.percentile(values[1:], [2.5, 97.5])
        by_name[name] = Interval(value=values[0], low=low, high=high)
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
    figures: dict[str, Sides] = {
        "preference_loss": {"tuned": loss},
        "reward_accuracy": {"tuned": exact(by_name["reward_accuracy"], fewest)},
        "desirable_preferred": {
            "base": exact(by_name["base_preferred"], fewest),
            "tuned": exact(by_name["tuned_preferred"], fewest),
            "difference": by_name["difference"],
        },
        "reward_margin": {"tuned": by_name["reward_margin"]},
        "desirable_reward": {"tuned": by_name["desirable_reward"]},
        "desirable_moved": {"tuned": exact(by_name["desirable_moved"], desirable)},
        "undesirable_reward": {"tuned": by_name["undesirable_reward"]},
        "undesirable_moved": {"tuned": exact(by_name["undesirable_moved"], undesirable)},
    }
    return HeldoutFigures(figures, weights, scores)


def _draws(*sizes: int) -> Iterator[list[Any]]:
    """Yield blocks of draws: for each group of answers how often each one is drawn, [draws, answers].

    The first draw has all answers once; at least RESAMPLES follow.
    """
    import numpy

    draw = numpy.random.default_rng(0)
    block = max(1, 2**22 // sum(sizes))
    for start in range(-1, RESAMPLES, block):
        all_once = 1 if start < 0 else 0
        yield [
            numpy.vstack(
                [
                    numpy.ones((all_once, size)),
                    draw.multinomial(size, [1 / size] * size, size=block - all_once),
                ]
            )
            for size in sizes
        ]


def _labelled_means(counts: Any, other_counts: Any, reward: Any, base: Any, tuned: Any) -> dict[str, Any]:
    """Return the figures of each draw of desirable answers (`counts`) and undesirable ones, by name.

    Args:
        reward, base, tuned: each answer's reward, and its log-probabilities for each token.
    """
    import numpy

    desirable = counts.shape[1]

    def share(values: Any) -> Any:
        return _share(counts, other_counts, values[:desirable], values[desirable:])

    def mean(counts: Any, rewards: Any, has_moved: Any) -> Any:
        return (counts @ numpy.stack([rewards, has_moved], axis=1) / len(rewards)).T

    rewards, other_rewards = reward[:desirable], reward[desirable:]
    desirable_reward, desirable_moved = mean(counts, rewards, rewards > 0)
    undesirable_reward, undesirable_moved = mean(other_counts, other_rewards, other_rewards < 0)
    base_preferred, tuned_preferred = share(base), share(tuned)
    return {
        "reward_accuracy": share(reward),
        "base_preferred": base_preferred,
        "tuned_preferred": tuned_preferred,
        "difference": tuned_preferred - base_preferred,
        "reward_margin": desirable_reward - undesirable_reward,
        "desirable_reward": desirable_reward,
        "desirable_moved": desirable_moved,
        "undesirable_reward": undesirable_reward,
        "undesirable_moved": undesirable_moved,
    }


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
