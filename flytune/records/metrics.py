"""metrics.json: the evaluation of base and tuned model on the same samples."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError, model_validator

from flytune.mistakes import mistakes
from flytune.records.figures import (
    ACCURACY,
    LOSS,
    MARGIN,
    PERPLEXITY,
    PREFERRED,
    Figure,
    Interval,
    MeasuredFigure,
    SampleScores,
    of_answers,
    of_labels,
)
from flytune.schema import Record, RecordError, Strict, omitted
from flytune.sentences import counted


class Score(Strict):
    """Held-out loss of one model in nats per token, over trained tokens only, with a 95 % confidence
    interval."""

    loss: float
    loss_low: float
    loss_high: float
    perplexity: float
    perplexity_low: float
    perplexity_high: float


class Answer(Strict):
    """The greedy answers of both models to one held-out prompt."""

    prompt: str
    reference: str
    base: str
    tuned: str
    base_f1: float = 0.0
    """F1 score of the words shared with the reference (flytune.evaluation.breakdown.f1), 0 to 1."""
    tuned_f1: float = 0.0
    base_stopped: bool = True
    """True if the answer ended with an end marker, before evaluation.max_new_tokens."""
    tuned_stopped: bool = True


class Part(Strict):
    """The loss of the held-out samples of one source or one range of lengths, in nats per token."""

    kind: str
    """`source`, `length`, or `label` of answers that have one."""
    name: str
    samples: int
    tokens: int
    base_loss: float
    tuned_loss: float
    difference: float
    """tuned - base, paired by sample, with a 95 % interval."""
    difference_low: float
    difference_high: float


class Wins(Strict):
    """Counts of the comparisons that each model won."""

    tuned: int
    base: int
    ties: int
    rate: float | None = omitted(None)
    """Win rate of the tuned model, ties counted as half; None for a single comparison and in older
    records."""
    rate_low: float | None = omitted(None)
    rate_high: float | None = omitted(None)


class ExpertLoad(Strict):
    """Tokens of the held-out samples that a layer's router sends to each of its experts."""

    layer: int
    base: list[int]
    tuned: list[int]

    def busiest(self, model: str) -> float:
        """Return the share of all choices that the busiest expert of `base` or `tuned` has."""
        counts: list[int] = getattr(self, model)
        return max(counts) / max(1, sum(counts))

    def idlest(self, model: str) -> float:
        """Return the share of all choices that the idlest expert has."""
        counts: list[int] = getattr(self, model)
        return min(counts) / max(1, sum(counts))

    def idle(self, model: str) -> int:
        """Return the number of experts that got no token."""
        return sum(not count for count in getattr(self, model))


class UntrainedExperts(Strict):
    """Experts of one parameter that got no token in training, so that their adapters are still what they were
    at the start."""

    parameter: str
    experts: list[int]
    of: int
    """Number of experts that the parameter has."""


class LabelCounts(Strict):
    """Held-out texts with one label, and how the tuned model labels texts."""

    label: str
    texts: int
    """Number of texts that have it."""
    answered: int
    """Number of texts that the model gives it to."""
    right: int
    """Number of texts that have it, and that the model gives it to."""
    answers: list[int] = omitted([])
    """Number of its texts by the label that the model gives them, in the order of labels: a row of the
    confusion matrix; empty where texts may have several labels."""

    @property
    def precision(self) -> float:
        """Return the share of the texts given the label that have it; 0 if there are none."""
        return self.right / self.answered if self.answered else 0.0

    @property
    def recall(self) -> float:
        """Return the share of the texts with the label that are given it; 0 if there are none."""
        return self.right / self.texts if self.texts else 0.0

    @property
    def f1(self) -> float:
        """Return the harmonic mean of precision and recall; 0 if both are."""
        return 2 * self.right / (self.texts + self.answered) if self.right else 0.0


class TaskScore(Strict):
    """One metric of one task of lm-evaluation-harness, for base and tuned model on the same documents."""

    task: str
    metric: str
    """Metric with the harness's filter: exact_match,strict-match."""
    higher_is_better: bool
    base: float
    base_stderr: float | None
    tuned: float
    tuned_stderr: float | None
    documents: int
    num_fewshot: int = 0


SINGLE_SAMPLE = "a single held-out sample is no evidence, and has no interval"
"""Doubt about figures of one sample."""


class Metrics(Record):
    """metrics.json: base and tuned model on the same held-out samples, by the figures of the objective.

    Of pairs, answers, parts and sample_wins are those of the chosen answers, of labelled answers those of the
    desirable ones.
    """

    figures: list[MeasuredFigure] = Field(default=[])
    """Figures of the objective that were measured, the most important first."""
    base: Score | None = omitted(None)
    """Loss and perplexity of the base model, which are also figures; None for an objective that does not aim
    at them."""
    tuned: Score | None = omitted(None)
    loss_difference: float | None = omitted(None)
    """Mean of tuned - base, paired by sample; negative means that tuning helped."""
    loss_difference_low: float | None = omitted(None)
    loss_difference_high: float | None = omitted(None)
    samples: int
    """Number of scored held-out samples: of pairs the pairs, of labelled answers the answers."""
    left_out: dict[str, int] = omitted({})
    """Held-out samples that losses, perplexities, sources and lengths are not of: their number by what they
    are."""
    tokens: int
    """Number of scored tokens: the trained ones, of a reward model all."""
    doubts: list[str] = omitted([])
    """Clauses that make the figures doubtful: samples that training has seen as well, or that are cut."""
    loaded_as: str
    """Precision in which both models were loaded: the dtype, or `nf4`, `fp4` or `int8` for an adapter on a
    quantized base."""
    answers: list[Answer]
    seconds: float
    tasks: list[TaskScore] = Field(default=[])
    parts: list[Part] = Field(default=[])
    sample_wins: Wins | None = None
    """Comparisons of the loss of each held-out sample."""
    answer_wins: Wins | None = None
    """Comparisons of the words that each answer shares with its reference."""
    expert_loads: list[ExpertLoad] = omitted([])
    """Load of each layer's experts, of a mixture of experts."""
    untrained_experts: list[UntrainedExperts] = omitted([])
    """Adapted experts that got no token in training."""
    labels: list[LabelCounts] = omitted([])
    """Labels of a classifier, in its order; empty of other models."""
    scores: SampleScores | None = omitted(None)
    """Scores of each held-out sample; None in older records."""

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_releases(cls, values: Any) -> Any:
        """Give records of earlier releases their figures."""
        if not isinstance(values, dict) or "figures" in values:
            return values
        values = {
            name: value.model_dump() if isinstance(value, Strict) else value for name, value in values.items()
        }
        left_out = set(_KINDS)
        if values.get("preference") or values.get("reward"):
            left_out |= {"base", "tuned", *_DIFFERENCE.values()}
        kept = {name: value for name, value in values.items() if name not in left_out}
        # Otherwise figures are missing, as any field can be.
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            kept["figures"] = figures_of(values)
        return kept

    @property
    def compared(self) -> MeasuredFigure:
        """Return the figure by which models of the objective are compared; raises IndexError where nothing
        was measured."""
        return next((figure for figure in self.figures if figure.is_paired), self.figures[0])

    @property
    def answered(self) -> str:
        """Return the kind of the answers whose losses and sample answers these are, such as `chosen `; empty
        if all are."""
        names = {figure.name for figure in self.figures}
        for kind in ("chosen", "desirable", "undesirable"):
            if f"{kind}_loss" in names:
                return f"{kind} "
        return ""

    @property
    def has_references(self) -> bool:
        """Return whether losses are those of reference answers, which the model was not trained on."""
        return any(figure.name == "reference_loss" for figure in self.figures)

    def figure(self, name: str) -> MeasuredFigure:
        """Return the figure with a name; raises KeyError if it was not measured."""
        return {figure.name: figure for figure in self.figures}[name]

    def unstopped(self, model: str) -> int:
        """Return the number of answers of `base` or `tuned` that were cut at max_new_tokens."""
        return sum(not getattr(answer, f"{model}_stopped") for answer in self.answers)

    @property
    def untrained_warning(self) -> str:
        """Return a sentence about adapted experts that got no token in training; empty if all got some."""
        if not self.untrained_experts:
            return ""
        count = sum(len(layer.experts) for layer in self.untrained_experts)
        first = self.untrained_experts[0]
        return (
            f"{counted(count, 'adapter')} of experts {'is' if count == 1 else 'are'} still as at the start, "
            f"since no token of training reached the experts ({len(first.experts)} of {first.of} of "
            f"{first.parameter}, the first is expert {first.experts[0]}): train more samples, or raise "
            "training.router_aux_loss_coef"
        )

    @property
    def never_stops(self) -> bool:
        """True if the tuned model hardly ever ends an answer, and less often than its base."""
        return self.unstopped("tuned") > max(self.unstopped("base"), 0.9 * len(self.answers))

    @property
    def is_better(self) -> bool:
        """True if the tuned model is significantly better by the figure that models of the objective are
        compared by."""
        return bool(self.figures) and self.compared.outcome == "better"


_DIFFERENCE = {"value": "loss_difference", "low": "loss_difference_low", "high": "loss_difference_high"}
_KINDS = ("preference", "reward")
"""Fields of the figures of pairs in earlier releases."""


def figures_of(values: Mapping[str, Any]) -> list[MeasuredFigure]:
    """Return the figures in the content of a metrics.json of any release.

    Raises:
        KeyError, TypeError, RecordError: a figure is missing or damaged.
    """
    try:
        return _figures_of(values)
    except ValidationError as error:
        raise RecordError([f"figures: {mistake}" for mistake in mistakes(error, MeasuredFigure)]) from None


def _figures_of(values: Mapping[str, Any]) -> list[MeasuredFigure]:
    if "figures" in values:
        return [MeasuredFigure.model_validate(figure) for figure in values["figures"]]
    if values.get("reward"):
        table = values["reward"]
        loss = LOSS.model_copy(update={"unit": "nats per pair", "neutral": math.log(2)})
        return [
            _tuned(ACCURACY, table, "accuracy"),
            _tuned(loss, values["tuned"], "loss"),
            _tuned(MARGIN, table, "margin"),
        ]
    difference = Interval(**{end: values[name] for end, name in _DIFFERENCE.items()})
    perplexity = _of_both(PERPLEXITY, values)
    loss = _of_both(LOSS, values).model_copy(update={"difference": difference})
    if not values.get("preference"):
        return [perplexity, loss]
    table = values["preference"]
    margin, accuracy, preferred, kind = MARGIN, ACCURACY, PREFERRED, "chosen"
    if table.get("labels"):
        margin, accuracy, preferred = map(of_labels, (margin, accuracy, preferred))
        kind = "desirable"
    return [
        _tuned(margin, table, "margin").model_copy(update={"is_paired": True}),
        _tuned(accuracy, table, "accuracy"),
        preferred.measured({side: _interval(table, side) for side in ("base", "tuned")}),
        of_answers(perplexity, kind),
        of_answers(loss, kind),
    ]


def _interval(values: Mapping[str, Any], name: str) -> Interval:
    return Interval(value=values[name], low=values[f"{name}_low"], high=values[f"{name}_high"])


def _tuned(figure: Figure, values: Mapping[str, Any], name: str) -> MeasuredFigure:
    return figure.measured({"tuned": _interval(values, name)})


def _of_both(figure: Figure, values: Mapping[str, Any]) -> MeasuredFigure:
    return figure.measured({side: _interval(values[side], figure.name) for side in ("base", "tuned")})
