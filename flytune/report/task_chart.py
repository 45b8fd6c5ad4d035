"""The chart of the report's tasks: scores of the base and the tuned model, with their standard errors."""

from typing import TYPE_CHECKING

from flytune.records import TaskScore
from flytune.report import charts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Further scores are only in the table.
_LINES = 24


def charted(scores: list[TaskScore]) -> list[TaskScore]:
    """Return the first scores between 0 and 1 (accuracies and the like), which can share an axis."""
    return [score for score in scores if 0 <= score.base <= 1 and 0 <= score.tuned <= 1][:_LINES]


def picture(scores: list[TaskScore]) -> str:
    """Draw a line for each charted score: a square for the base, a dot for the tuned model, with standard
    errors."""
    shown = charted(scores)[::-1]

    def draw(axes: "Axes") -> None:
        for height, score in enumerate(shown):
            sides = [
                (score.base, score.base_stderr, "s", charts.MUTED),
                (score.tuned, score.tuned_stderr, "o", charts.BLUE),
            ]
            for offset, (value, error, marker, color) in zip((0.16, -0.16), sides, strict=True):
                axes.errorbar(
                    [value],
                    [height + offset],
                    xerr=[error or 0],
                    fmt=marker,
                    color=color,
                    ecolor=color,
                    markersize=4,
                )
        axes.set_yticks(
            range(len(shown)), [f"{score.task}\n{score.metric.partition(',')[0]}" for score in shown]
        )
        axes.set_ylim(-0.6, len(shown) - 0.4)
        axes.set_xlim(-0.02, 1.02)
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter("{x:.1f}")

    label = "; ".join(
        f"{score.task} {score.metric} {score.base:.3f} and {score.tuned:.3f}" for score in reversed(shown)
    )
    return charts.picture(draw, f"Scores of base and tuned model: {label}", height=0.7 + 0.42 * len(shown))


def best(score: TaskScore) -> str:
    """Describe the better direction of a score."""
    return "higher is better" if score.higher_is_better else "lower is better"
