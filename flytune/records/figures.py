"""Figures of a model: what is measured, in which unit, and which way is better. Each objective lists its
own."""

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, PlainSerializer

from flytune.schema import Strict, omitted

PREFERS_NOTHING = "a model that prefers nothing"


class Figure(Strict):
    """A quantity of a model, of which each objective has several (flytune.objectives)."""

    name: str
    """Name in records."""
    title: str
    """Name for readers."""
    unit: str = ""
    """Unit; a share of something is shown in percent."""
    better: Literal["lower", "higher", "neither"]
    """Direction of a better model; `neither` of a figure that the objective does not aim at."""
    meaning: str = ""
    """Definition in a few words, where the title is none."""
    neutral: float | None = None
    """Value of a model that reads no sample, such as one that prefers nothing."""
    neutral_model: str = omitted(PREFERS_NOTHING)
    """Phrase of that model."""
    is_paired: bool = False
    """True if models are compared by it, sample by sample (SampleScores)."""
    scaled_by: list[str] = Field(default=[])
    """Dotted fields of the recipe that change its scale: models whose recipes differ in them are not compared
    by it."""
    step: str = ""
    """Field of a logged step that has it for the trained rows; each such figure has a chart of its own."""
    eval_step: str = ""
    """Field of a logged step that has it for the held-out samples."""

    @property
    def is_share(self) -> bool:
        """True if it is a share, from 0 to 1."""
        return self.unit.startswith("share")

    @property
    def direction(self) -> str:
        """Return the better direction as a phrase."""
        return {"neither": "not aimed at"}.get(self.better, f"{self.better} is better")

    def measured(self, sides: Mapping[str, "Interval"]) -> "MeasuredFigure":
        """Return it with the intervals of tuned, and of base and difference if it has them."""
        return MeasuredFigure.model_validate(
            {name: getattr(self, name) for name in Figure.model_fields} | dict(sides)
        )


class Interval(Strict):
    """A value with its 95 % confidence interval; the ends are the largest floats where it is unknown."""

    value: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """True if there are enough samples for an interval."""
        return self.high < sys.float_info.max


class MeasuredFigure(Figure):
    """A figure, measured on the held-out samples."""

    base: Interval | None = None
    """Value of the base model; None if the base has none."""
    tuned: Interval
    difference: Interval | None = None
    """tuned - base, paired by sample; None if the base has none, or no difference is taken."""

    @property
    def outcome(self) -> Literal["better", "worse", "unclear"]:
        """Return the significant direction: of the difference, or else compared with a model that prefers
        nothing."""
        interval, zero = (self.difference, 0.0) if self.difference else (self.tuned, self.neutral)
        if zero is None or self.better == "neither":
            return "unclear"
        below, above = interval.high < zero, interval.low > zero
        if not below and not above:
            return "unclear"
        return "better" if below == (self.better == "lower") else "worse"


def _numbers(value: Any) -> Any:
    """Return the numbers of a text that has them with spaces between."""
    return value.split() if isinstance(value, str) else value


Numbers = Annotated[
    list[Annotated[float, Field(allow_inf_nan=False)]],
    BeforeValidator(_numbers),
    PlainSerializer(lambda values: " ".join(map(repr, values)), when_used="json"),
]
"""Numbers that are one line of a JSON file, with spaces between."""


class SampleScores(Strict):
    """Scores of the tuned model on each held-out sample, by which it is compared with others on the same
    samples."""

    samples_sha256: str
    """SHA-256 of the tokens and labels of all scored samples, in their order; equal ones are the same
    samples."""
    weights: Numbers
    """Weight of each sample in the mean: its scored tokens, or 1 for a pair."""
    scores: dict[str, Numbers]
    """Scores of each sample times its weight, named as their figure is, which is their sum over that of the
    weights."""


def of_step(name: str, title: str, meaning: str, unit: str = "") -> Figure:
    """Return a figure of a logged step, which no objective aims at."""
    return Figure(name=name, title=title, unit=unit, better="neither", meaning=meaning, step=name)


ANSWER_TOKENS = of_step("answer_tokens", "length of an answer", "mean over the drawn answers", "tokens")
TRUNCATED = of_step("truncated", "truncated answers", "no end marker was drawn", "share of answers")
SHARE_OF_TEXTS = Figure(
    name="accuracy",
    title="accuracy",
    unit="share of texts",
    better="higher",
    is_paired=True,
    step="accuracy",
    neutral_model="the best model with one answer for all texts",
)
LOSS = Figure(
    name="loss",
    title="loss",
    unit="nats per token",
    better="lower",
    is_paired=True,
    step="loss",
    eval_step="eval_loss",
)
PERPLEXITY = Figure(
    name="perplexity", title="perplexity", better="lower", meaning="exp of the loss of a token"
)
ACCURACY = Figure(
    name="reward_accuracy",
    title="reward accuracy",
    unit="share of pairs",
    better="higher",
    meaning="pairs whose chosen answer has the larger reward",
    neutral=0.5,
    is_paired=True,
    step="reward_accuracy",
)
MARGIN = Figure(
    name="reward_margin",
    title="reward margin",
    unit="nats",
    better="higher",
    meaning="mean reward of the chosen answer less that of the rejected one",
    neutral=0.0,
    step="reward_margin",
)
PREFERRED = Figure(
    name="chosen_preferred",
    title="chosen answer more probable",
    unit="share of pairs",
    better="higher",
    meaning="pairs whose chosen answer is more probable to the model than the rejected one",
)


Kind = TypeVar("Kind", bound=Figure)


def of_answers(figure: Kind, answers: str) -> Kind:
    """Return a figure of all answers as one of some of them, such as the chosen ones, which the objective
    does not aim at."""
    update = {
        "name": f"{answers}_{figure.name}",
        "title": f"{figure.title} of the {answers} answers",
        "better": "neither",
    }
    return figure.model_copy(update=update | {"is_paired": False, "step": "", "eval_step": ""})


def of_labels(figure: Figure) -> Figure:
    """Return a figure of pairs as one of all pairs of a desirable and an undesirable answer."""
    texts = {name: getattr(figure, name) for name in ("name", "title", "meaning")}
    changed = {
        name: text.replace("chosen", "desirable").replace("rejected", "undesirable")
        for name, text in texts.items()
    }
    return figure.model_copy(update=changed)
