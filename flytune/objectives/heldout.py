"""Held-out rows as an objective evaluates them: what both models are scored on, and the figures that
follow."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from flytune.models import Row, bootstrap
from flytune.models.scoring import sequences_of
from flytune.recipe import Recipe
from flytune.records import Interval

Sides = dict[str, Interval]
"""The intervals of a figure: base, tuned and difference, as far as it has them."""


class HeldoutFigures(NamedTuple):
    """Figures of the held-out samples, and the scores by which models are compared."""

    figures: dict[str, Sides]
    """Sides of each figure, named as the figure is."""
    weights: Any
    """Weight of each sample, shape (samples,)."""
    scores: dict[str, Any]
    """Scores of each sample times its weight, shape (samples,), named as their figure is."""
    neutral: Mapping[str, float] = MappingProxyType({})
    """Value of each figure of a model that reads no sample, where it follows from the samples."""
    fields: Mapping[str, Any] = MappingProxyType({})
    """Other fields of Metrics."""


class ModelScores(NamedTuple):
    """Scores of one language model on the held-out sequences."""

    nll: Any
    """Negative log-likelihood of each sequence, summed over its scored tokens, in nats: float64
    (sequences,)."""
    tokens: Any
    """Number of scored tokens of each sequence: int64 (sequences,)."""
    own: Any = None
    """Result of HeldoutRows.own_scores."""
    reference: Any = None
    """The nll by the model that rewards are compared with, of the base's scores where that is another one:
    the base with the adapter that training began from (method.adapter)."""


class HeldoutRows:
    """The held-out rows of one evaluation, whose loss the objective aims at. Subclasses contain only what
    differs."""

    answers: str = ""
    """Kind of the answers that describe a model (`chosen`), where the objective does not aim at their
    loss."""
    desirable: int = 0
    """Number of rows that are labelled desirable."""
    has_reference: ClassVar[bool] = False
    """True if its figures compare with the model that training began from."""

    def __init__(self, recipe: Recipe, rows: Sequence[Row], tokenizer: Any) -> None:
        self.recipe, self.rows, self.tokenizer = recipe, rows, tokenizer
        self.sequences = sequences_of(rows)

    @property
    def described(self) -> int:
        """Number of sequences, the first ones, that losses, answers, sources and lengths are of."""
        return len(self.rows)

    def by_sequence(self, of_rows: Sequence[str]) -> list[str]:
        """Return what is known of each row in the order of the sequences that are described."""
        return list(of_rows)

    def left_out(self) -> dict[str, int]:
        """Return the number of rows that are not described, by what they are."""
        return {}

    def own_scores(self, model: Any, label: str) -> Any:
        """Return what a model is scored by beside the loss of the sequences; `label` is for the progress
        bar."""
        return None

    def figures(self, base: ModelScores, tuned: ModelScores) -> HeldoutFigures:
        """Return the figures of language models beside the loss, and the scores by which they are
        compared."""
        return HeldoutFigures({}, base.tokens, {"loss": tuned.nll})

    def of_both(self, models: Any) -> HeldoutFigures:
        """Return the figures of a model without a head of words, and of its base where that has the same head
        (evaluation's BothModels)."""
        return self.without_words(models.tuned)

    def without_words(self, model: Any) -> HeldoutFigures:
        """Return the figures of a model that has no head of words; neither has its base a head like it."""
        raise NotImplementedError


def intervals(values: Mapping[str, Any], weights: Any) -> dict[str, Interval]:
    """Return the mean of each array of values times weights, with the same resamples for all of them.

    Arrays of booleans are shares. Where all values of one are equal, no resample differs, and the interval is
    that of Clopper and Pearson (1934).
    """
    import numpy

    columns = numpy.stack([numpy.asarray(value, dtype=float) for value in values.values()], axis=1)
    ends = zip(*bootstrap(columns, weights), strict=True)
    means = {
        name: Interval(value=value, low=low, high=high)
        for name, (value, low, high) in zip(values, ends, strict=True)
    }
    return {
        name: exact(interval, len(weights)) if numpy.asarray(values[name]).dtype == bool else interval
        for name, interval in means.items()
    }


def exact(share: Interval, samples: int) -> Interval:
    """Return the interval of a share, widened if it is 0 or 1, of so many samples."""
    if share.value not in (0.0, 1.0) or not share.is_known:
        return share
    reach = 1 - 0.025 ** (1 / samples)
    return Interval(value=share.value, low=max(0.0, share.value - reach), high=min(1.0, share.value + reach))
