"""The report's charts of the objective's figures: one quantity an axis, during training and on the held-out
samples."""

from typing import TYPE_CHECKING, NamedTuple

from flytune.records import Figure, MeasuredFigure, Metrics, TrainingResult
from flytune.report import charts
from flytune.sentences import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Chart(NamedTuple):
    """A picture with its caption."""

    picture: str
    title: str
    text: str


def of_training(training: TrainingResult, metrics: Metrics) -> list[Chart]:
    """Draw each figure of the steps in a chart of its own, with the held-out samples' value where it is the
    same figure."""
    measured = {(figure.name, figure.unit): figure for figure in metrics.figures}
    return [
        Chart(
            _by_step(figure, training, measured.get((figure.name, figure.unit))),
            f"{figure.title[:1].upper()}{figure.title[1:]}",
            "; ".join(filter(None, [figure.unit, figure.meaning, figure.direction])),
        )
        for figure in training.logged
        if not training.steps or any(getattr(step, figure.step) is not None for step in training.steps)
    ]


def of_rewards(training: TrainingResult) -> Chart | None:
    """Draw the mean of each reward of the drawn answers, without weights, in one chart; None if there are not
    several."""
    names = list(dict.fromkeys(name for step in training.steps for name in step.rewards))
    if len(names) < 2:
        return None
    curves = {
        name: charts.thinned(
            [(step.step, step.rewards[name]) for step in training.steps if name in step.rewards]
        )
        for name in names
    }

    def draw(axes: "Axes") -> None:
        for number, (name, (steps, values)) in enumerate(curves.items()):
            axes.plot(steps, values, color=charts.color(number), alpha=0.35, linewidth=0.9)
            smooth = charts.running_mean(values, max(1, len(values) // 20))
            axes.plot(steps, smooth, color=charts.color(number), label=name)
        axes.legend()
        charts.by_step(axes)

    last = ", ".join(f"{name} {values[-1]:.3g}" for name, (_, values) in curves.items())
    return Chart(
        charts.picture(draw, f"Mean of each reward by optimizer step; at the last one {last}"),
        "Reward by part",
        "each reward's mean over the drawn answers, without its weight",
    )


def _by_step(figure: Figure, training: TrainingResult, measured: MeasuredFigure | None) -> str:
    steps, values = _curve(training, figure.step)
    smooth = charts.running_mean(values, max(1, len(values) // 20))
    scored, eval_values = _curve(training, figure.eval_step)
    last = training.steps[-1].step if training.steps else 1
    sides = ((0, "base", "s"), (last, "tuned", "o"))
    ends = [
        (step, side, marker, interval)
        for step, side, marker in sides
        if (interval := getattr(measured, side, None))
    ]

    def draw(axes: "Axes") -> None:
        axes.plot(steps, values, color=charts.BLUE, alpha=0.35, linewidth=0.9)
        axes.plot(steps, smooth, color=charts.BLUE, label="training")
        if scored:
            axes.plot(scored, eval_values, color=charts.ORANGE, marker=".", markersize=4, label="held-out")
        for step, side, marker, interval in ends:
            errors = [[min(interval.value - interval.low, 9)], [min(interval.high - interval.value, 9)]]
            axes.errorbar(
                [step],
                [interval.value],
                errors,
                fmt=marker,
                color=charts.ORANGE,
                markersize=5,
                label=f"held-out, {side}",
            )
        if figure.neutral is not None:
            axes.axhline(
                figure.neutral, color=charts.MUTED, linestyle="--", linewidth=1, label=figure.neutral_model
            )
        axes.legend()
        charts.by_step(axes)
        if figure.is_share:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    unit = f" in {figure.unit}" if figure.unit else ""
    held = "".join(
        f", and held-out of the {side} model ({interval.value:.3f})" for _, side, _, interval in ends
    )
    points = f", and held-out at {counted(len(eval_values), 'point')} during training" if eval_values else ""
    return charts.picture(
        draw, f"Training {figure.title}{unit} over {counted(last, 'step')}{held}{points}; {figure.direction}"
    )


def _curve(training: TrainingResult, field: str) -> tuple[list[float], list[float]]:
    """Return the steps that have a field, and its values."""
    points = [(step.step, getattr(step, field)) for step in training.steps] if field else []
    return charts.thinned([point for point in points if point[1] is not None])


def shares(metrics: Metrics) -> str:
    """Draw the shares of held-out pairs, of both models, with their intervals, and a line at one half; "" if
    there are none."""
    figures = [figure for figure in metrics.figures if figure.unit == "share of pairs"]
    sides = (("tuned", "o", charts.BLUE), ("base", "s", charts.MUTED))
    shown = [
        (f"{figure.title}, {side}" if figure.base else figure.title, interval, marker, color)
        for figure in figures
        for side, marker, color in sides
        if (interval := getattr(figure, side))
    ]
    if not shown:
        return ""

    def draw(axes: "Axes") -> None:
        for height, (_, interval, marker, color) in enumerate(reversed(shown)):
            errors = [[min(interval.value - interval.low, 1)], [min(interval.high - interval.value, 1)]]
            axes.errorbar([interval.value], [height], xerr=errors, fmt=marker, color=color, markersize=5)
        axes.axvline(0.5, color=charts.MUTED, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(shown)), [label for label, *_ in reversed(shown)])
        axes.set_ylim(-0.6, len(shown) - 0.4)
        axes.set_xlim(-0.02, 1.02)
        axes.grid(visible=False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    label = ", ".join(f"{text} {interval.value:.0%}" for text, interval, *_ in shown)
    return charts.picture(
        draw, f"Shares of held-out pairs, with 95 % intervals: {label}", height=0.8 + 0.3 * len(shown)
    )
