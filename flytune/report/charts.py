"""The report's pictures: inline SVG whose colours are the page's, so that they turn dark and print with it."""

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from flytune.hardware.shapes import GIB
from flytune.records.dataset import Manifest
from flytune.records.metrics import Metrics
from flytune.records.plan import Plan
from flytune.records.training import TrainingResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe & Ito's palette (Color Universal Design, 2008), told apart by colour-blind readers too; darkest differences first.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
# Stand-ins that matplotlib draws with and the page's style replaces.
_INK, MUTED, _RULE, BLUE, ORANGE = "#010101", "#020202", "#030303", "#040404", "#050505"
_VARIABLES = {_INK: "--ink", MUTED: "--muted", _RULE: "--rule", BLUE: "--blue", ORANGE: "--orange"}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
# A curve of more points is drawn as means of equal stretches: the page stays small, the eye sees no less.
_POINTS = 240


def loss(training: TrainingResult, metrics: Metrics) -> str:
    """Training loss by step, the held-out loss where it was scored, and that of base and tuned model at the two ends."""
    steps, losses = _thinned([(step.step, step.loss) for step in training.steps])
    smooth = _running_mean(losses, max(1, len(losses) // 20))
    last = training.steps[-1].step if training.steps else 1
    scored, eval_losses = _thinned([(step.step, step.eval_loss) for step in training.steps if step.eval_loss is not None])

    def draw(axes: "Axes") -> None:
        axes.plot(steps, losses, color=BLUE, alpha=0.35, linewidth=0.9)
        axes.plot(steps, smooth, color=BLUE, label="training")
        if scored:
            axes.plot(scored, eval_losses, color=ORANGE, marker=".", markersize=4, label="held-out")
        ends = [(0, metrics.base, "s", "held-out, base"), (last, metrics.tuned, "o", "held-out, tuned")]
        for step, score, marker, label in ends:
            reach = [[min(score.loss - score.loss_low, 9)], [min(score.loss_high - score.loss, 9)]]
            axes.errorbar([step], [score.loss], reach, fmt=marker, color=ORANGE, ecolor=ORANGE, markersize=5, label=label)
        axes.legend()
        _by_step(axes)

    return picture(
        draw,
        f"Training loss in nats a token over {last} steps, with the held-out loss of the base model "
        f"({metrics.base.loss:.3f}) and of the tuned model ({metrics.tuned.loss:.3f})"
        + (f", and of the model between, scored {len(eval_losses)} times" if eval_losses else ""),
    )


def learning_rate(training: TrainingResult) -> str:
    """Learning rate by step."""
    points = [(step.step, step.learning_rate) for step in training.steps]
    return _curve(points, "Learning rate by optimizer step; its largest value is")


def grad_norm(training: TrainingResult) -> str:
    """Norm of all gradients by step, before clipping."""
    points = [(step.step, step.grad_norm) for step in training.steps if step.grad_norm is not None]
    return _curve(points, "Gradient norm by optimizer step, before clipping; its largest value is")


def time(spent: dict[str, float]) -> str:
    """Seconds by part of a step, as one bar."""
    total = sum(spent.values())

    def draw(axes: "Axes") -> None:
        left = 0.0
        for number, seconds in enumerate(spent.values()):
            share = 100 * seconds / total if total else 0.0
            axes.barh([0], [share], left=left, height=0.6, color=color(number))
            left += share
        axes.set_xlim(0, 100)
        axes.set_ylim(-0.4, 0.4)
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.xaxis.set_major_formatter("{x:.0f} %")

    said = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in spent.items()) if total else "nothing was logged"
    return picture(draw, f"Where the time of a step goes: {said}", height=0.8)


def throughput(training: TrainingResult) -> str:
    """Tokens per second of each logged stretch, and over the whole run."""
    steps, rates = _thinned([(step.step, step.tokens_per_second) for step in training.steps])
    mean = training.tokens_per_second

    def draw(axes: "Axes") -> None:
        axes.plot(steps, rates, color=BLUE)
        axes.axhline(mean, color=ORANGE, linestyle="--", linewidth=1, label="whole run")
        axes.set_ylim(0, 1.25 * max([*rates, mean, 1e-9]))
        axes.legend(loc="upper right")
        _by_step(axes)
        axes.yaxis.set_major_formatter("{x:,.0f}")

    return picture(draw, f"Tokens per second by optimizer step; {mean:,.0f} over the whole run")


def lengths(manifest: Manifest) -> str:
    """How long the samples are, and where the recipe cuts."""
    bins = manifest.histogram

    def draw(axes: "Axes") -> None:
        left, width = [bin.low for bin in bins], [bin.high - bin.low for bin in bins]
        axes.bar(left, [bin.samples for bin in bins], width, align="edge", color=BLUE, edgecolor="none", linewidth=0)
        axes.axvline(manifest.max_length, color=ORANGE, linestyle="--", linewidth=1.2)
        is_right = manifest.max_length > 0.5 * max([*(bin.high for bin in bins), 1])
        axes.annotate(
            f"max_length {manifest.max_length}",
            (manifest.max_length, 1),
            (-4 if is_right else 4, 0),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            ha="right" if is_right else "left",
            va="top",
        )
        axes.set_xlabel("tokens of a sample, before any cut")
        axes.yaxis.set_major_formatter("{x:,.0f}")

    return picture(
        draw, f"Histogram of sample lengths in tokens; the longest has {manifest.longest}, max_length is {manifest.max_length}"
    )


def memory(plan: Plan, training: TrainingResult) -> str:
    """Phase by phase, the planned components as one bar above the measured peak; a line where the memory ends."""
    need = plan.memory
    phases = list(need.phases)
    available, planned = need.available_bytes / GIB, {phase: sum(need.phases[phase].values()) for phase in phases}
    most = max([*planned.values(), *training.peaks.values()]) / GIB

    def draw(axes: "Axes") -> None:
        for height, phase in enumerate(reversed(phases)):
            left = 0.0
            for number, name in enumerate(need.components):
                width = need.phases[phase].get(name, 0) / GIB
                axes.barh([height + 0.18], [width], left=left, height=0.34, color=color(number))
                left += width
            held = training.peaks.get(phase, 0)
            axes.barh([height - 0.18], [held / GIB], height=0.3, color=MUTED)
            for value, offset in ((planned[phase], 0.18), (held, -0.18)):
                text = size(value) if value else "not measured"
                axes.annotate(text, (value / GIB, height + offset), (4, 0), textcoords="offset points", va="center", fontsize=7)
        if available < 3 * most:
            axes.axvline(available, color=_INK, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(phases)), phases[::-1])
        axes.set_xlim(0, 1.2 * max(most, available if available < 3 * most else 0.0))
        axes.grid(visible=False)
        axes.set_xlabel(f"GiB; above planned, below in grey measured; there are {size(need.available_bytes)}")

    said = ", ".join(f"{phase} {size(planned[phase])} and {size(training.peaks.get(phase, 0))}" for phase in phases)
    return picture(draw, f"{need.resource} by phase, planned and measured: {said}", height=3.4)


def color(number: int) -> str:
    """Of the planned component with that number, in the picture and in the table beside it."""
    return PALETTE[number % len(PALETTE)]


def size(count: float) -> str:
    """Bytes as a person reads them: 1.41 GiB."""
    for unit, bytes_in_it in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= bytes_in_it:
            return f"{count / bytes_in_it:.3g} {unit}" if count < 1000 * bytes_in_it else f"{count / bytes_in_it:,.0f} {unit}"
    return f"{count:.0f} bytes"


def _curve(points: Sequence[tuple[float, float]], label: str) -> str:
    steps, values = _thinned(points)

    def draw(axes: "Axes") -> None:
        axes.plot(steps, values, color=BLUE)
        axes.set_ylim(bottom=0)
        _by_step(axes)
        axes.yaxis.set_major_formatter("{x:g}")

    return picture(draw, f"{label} {max(values, default=0):.2g}")


def _by_step(axes: "Axes") -> None:
    axes.set_xlabel("optimizer step")
    axes.locator_params(axis="x", integer=True)


def _thinned(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    stretch = -(-len(points) // _POINTS) or 1
    groups = [points[start : start + stretch] for start in range(0, len(points), stretch)]
    columns = [[sum(point[axis] for point in group) / len(group) for group in groups] for axis in (0, 1)]
    return columns[0], columns[1]


def _running_mean(values: Sequence[float], reach: int) -> list[float]:
    # Windows shrink towards both ends: cut on one side only, they would bend the curve there.
    reaches = [min(reach, at, len(values) - 1 - at) for at in range(len(values))]
    windows = [values[at - around : at + around + 1] for at, around in enumerate(reaches)]
    return [sum(window) / len(window) for window in windows]


def picture(draw: Callable[["Axes"], None], label: str, height: float = 2.6) -> str:
    """One SVG element, `height` inches of a width of 5.2; `label` tells it to who cannot see it."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: Any = _STYLE | {"svg.hashsalt": label}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.2, height), layout="constrained")
        canvas, stream = FigureCanvasSVG(figure), io.StringIO()
        draw(figure.add_subplot())
        canvas.print_svg(stream, metadata={"Date": None, "Creator": None})
    svg = "<svg" + stream.getvalue().partition("<svg")[2]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Several pictures share a page: names that nothing refers to would stand there twice.
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)
    # The page's own font.
    svg = re.sub(r"font: (\S+) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]*; *", "", svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    for stand_in, variable in _VARIABLES.items():
        svg = svg.replace(stand_in, f"var({variable})")
    head = re.search(r'viewBox="[^"]*"', svg)
    assert head
    return f'<svg role="img" aria-label="{escape(label)}" {head[0]}>{svg[svg.index(">") + 1 :]}'
