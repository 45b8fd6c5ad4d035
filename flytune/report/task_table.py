"""The picture beside the report's table of tasks: base and tuned model, with their standard errors."""

from typing import TYPE_CHECKING

from flytune.records.metrics import TaskScore
from flytune.report import charts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More lines than these are read in the table.
_LINES = 24


def drawn(scores: list[TaskScore]) -> list[TaskScore]:
    """The first scores that are shares (accuracies and the like): others have axes of their own."""
    return [score for score in scores if 0 <= score.base <= 1 and 0 <= score.tuned <= 1][:_LINES]


def picture(scores: list[TaskScore]) -> str:
    """A line for each score that is drawn: a square for the base, a dot for the tuned model, one standard error each way."""
    shown = drawn(scores)[::-1]

    def draw(axes: "Axes") -> None:
        for height, score in enumerate(shown):
            sides = [(score.base, score.base_stderr, "s", charts.MUTED), (score.tuned, score.tuned_stderr, "o", charts.BLUE)]
            for offset, (value, error, marker, color) in zip((0.16, -0.16), sides, strict=True):
                axes.errorbar(
                    [value], [height + offset], xerr=[error or 0], fmt=marker, color=color, ecolor=color, markersize=4
                )
        axes.set_yticks(range(len(shown)), [f"{score.task}\n{score.metric.partition(',')[0]}" for score in shown])
        axes.set_ylim(-0.6, len(shown) - 0.4)
        axes.set_xlim(-0.02, 1.02)
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter("{x:.1f}")

    said = "; ".join(f"{score.task} {score.metric} {score.base:.3f} and {score.tuned:.3f}" for score in reversed(shown))
    return charts.picture(draw, f"Scores of base and tuned model: {said}", height=0.7 + 0.42 * len(shown))


def best(score: TaskScore) -> str:
    """Which way is better, as a person reads it."""
    return "higher is better" if score.higher_is_better else "lower is better"
