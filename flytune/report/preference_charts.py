"""The report's charts of preferences: held-out pairs of both models, and rewards during training."""

from typing import TYPE_CHECKING

from flytune.records import Preference, TrainingResult
from flytune.report import charts

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def accuracy(found: Preference) -> str:
    """Draw the shares of held-out pairs whose chosen answer wins, with their intervals, and a line at one half."""
    shown = [
        ("larger reward", "accuracy", "o", charts.BLUE),
        ("more probable, tuned", "tuned", "o", charts.BLUE),
        ("more probable, base", "base", "s", charts.MUTED),
    ]

    def draw(axes: "Axes") -> None:
        for height, (_, name, marker, color) in enumerate(reversed(shown)):
            value, low, high = (getattr(found, name + end) for end in ("", "_low", "_high"))
            axes.errorbar([value], [height], xerr=[[value - low], [high - value]], fmt=marker, color=color, markersize=5)
        axes.axvline(0.5, color=charts.MUTED, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(shown)), [label for label, *_ in reversed(shown)])
        axes.set_ylim(-0.6, len(shown) - 0.4)
        axes.set_xlim(0, 1)
        axes.grid(visible=False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    label = ", ".join(f"{text} {getattr(found, name):.0%}" for text, name, *_ in shown)
    return charts.picture(draw, f"Held-out pairs whose chosen answer wins, with 95 % intervals: {label}", height=1.7)


def rewards(training: TrainingResult) -> str:
    """Draw accuracy and margin of the rewards of the trained pairs by step; "" if no step has them."""
    logged = [step for step in training.steps if step.reward_accuracy is not None and step.reward_margin is not None]
    if not logged:
        return ""
    steps, accuracies = charts.thinned([(step.step, step.reward_accuracy or 0.0) for step in logged])
    _, margins = charts.thinned([(step.step, step.reward_margin or 0.0) for step in logged])

    def draw(axes: "Axes") -> None:
        axes.plot(steps, accuracies, color=charts.BLUE, label="accuracy")
        axes.plot(steps, margins, color=charts.ORANGE, label="margin")
        axes.legend()
        charts.by_step(axes)

    return charts.picture(
        draw, f"Rewards of the trained pairs by step: accuracy {accuracies[-1]:.0%} and margin {margins[-1]:.3f} in the last"
    )
