"""The report's charts: inline SVG with the page's colours, so that they follow its dark mode and its print
style."""

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from flytune.hardware.shapes import GIB
from flytune.records import Manifest, Plan, TrainingResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe & Ito's palette (Color Universal Design, 2008), which colour-blind readers can distinguish; strongest
# contrasts first. Plans have up to a dozen components: further ones have colours of Tol's "muted"
# (SRON/EPS/TN/09-002).
PALETTE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#999999",
    "#332288",
    "#882255",
    "#999933",
    "#44aa99",
    "#aa4499",
    "#cc6677",
)
# Placeholder colours for matplotlib, which the page's CSS variables replace.
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
# A curve with more points is drawn as means of equal intervals: the page stays small, without a visible
# difference.
_POINTS = 240


def learning_rate(training: TrainingResult) -> str:
    """Draw the learning rate by step."""
    points = [(step.step, step.learning_rate) for step in training.steps]
    return _curve(points, "Learning rate by optimizer step; maximum")


def grad_norm(training: TrainingResult) -> str:
    """Draw the norm of all gradients by step, before clipping."""
    points = [(step.step, step.grad_norm) for step in training.steps if step.grad_norm is not None]
    return _curve(points, "Gradient norm by optimizer step, before clipping; maximum")


def time(spent: dict[str, float]) -> str:
    """Draw the shares of the parts of a step in its time, as one bar."""
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

    label = (
        ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in spent.items())
        if total
        else "nothing was logged"
    )
    return picture(draw, f"Time of a step by part: {label}", height=0.8)


def throughput(training: TrainingResult) -> str:
    """Draw the tokens per second of each logged step, and their mean over the whole run."""
    steps, rates = thinned([(step.step, step.tokens_per_second) for step in training.steps])
    mean = training.tokens_per_second

    def draw(axes: "Axes") -> None:
        axes.plot(steps, rates, color=BLUE)
        axes.axhline(mean, color=ORANGE, linestyle="--", linewidth=1, label="whole run")
        axes.set_ylim(0, 1.25 * max([*rates, mean, 1e-9]))
        axes.legend(loc="upper right")
        by_step(axes)
        axes.yaxis.set_major_formatter("{x:,.0f}")

    return picture(draw, f"Tokens per second by optimizer step; {mean:,.0f} over the whole run")


def lengths(manifest: Manifest) -> str:
    """Draw a histogram of sample lengths, with the recipe's max_length."""
    bins = manifest.histogram

    def draw(axes: "Axes") -> None:
        left, width = [bin.low for bin in bins], [bin.high - bin.low for bin in bins]
        axes.bar(
            left,
            [bin.samples for bin in bins],
            width,
            align="edge",
            color=BLUE,
            edgecolor="none",
            linewidth=0,
        )
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
        axes.set_xlabel("tokens of a sample before any cut")
        axes.yaxis.set_major_formatter("{x:,.0f}")

    return picture(
        draw,
        f"Histogram of sample lengths in tokens; the longest has {manifest.longest}, max_length is "
        f"{manifest.max_length}",
    )


def memory(plan: Plan, training: TrainingResult) -> str:
    """Draw for each phase the planned components as one bar above the measured peak, and a line at the
    available memory."""
    need = plan.memory
    phases = list(need.phases)
    available, planned = (
        need.available_bytes / GIB,
        {phase: sum(need.phases[phase].values()) for phase in phases},
    )
    most = max([*planned.values(), *training.peaks.values()]) / GIB

    def draw(axes: "Axes") -> None:
        for height, phase in enumerate(reversed(phases)):
            left = 0.0
            for number, name in enumerate(need.components):
                width = need.phases[phase].get(name, 0) / GIB
                axes.barh([height + 0.18], [width], left=left, height=0.34, color=color(number))
                left += width
            measured = training.peaks.get(phase, 0)
            axes.barh([height - 0.18], [measured / GIB], height=0.3, color=MUTED)
            for value, offset in ((planned[phase], 0.18), (measured, -0.18)):
                text = size(value) if value else "not measured"
                axes.annotate(
                    text,
                    (value / GIB, height + offset),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7,
                )
        if available < 3 * most:
            axes.axvline(available, color=_INK, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(phases)), phases[::-1])
        axes.set_xlim(0, 1.2 * max(most, available if available < 3 * most else 0.0))
        axes.grid(visible=False)
        axes.set_xlabel(f"GiB: planned (colours) and measured (grey); available {size(need.available_bytes)}")

    label = ", ".join(
        f"{phase} {size(planned[phase])} and {size(training.peaks.get(phase, 0))}" for phase in phases
    )
    return picture(draw, f"{need.resource} by phase, planned and measured: {label}", height=3.4)


def planned_memory(plan: Plan) -> str:
    """Draw the planned memory of each phase as a bar of its components, and a line at what there is: an SVG
    file's content."""
    need, phases = plan.memory, list(plan.memory.phases)
    available = need.available_bytes / GIB

    def draw(axes: "Axes") -> None:
        named = set[str]()
        for height, phase in enumerate(reversed(phases)):
            left = 0.0
            for number, name in enumerate(need.components):
                width = need.phases[phase].get(name, 0) / GIB
                label = None if name in named or not width else name
                named |= {name} if width else set()
                axes.barh([height], [width], left=left, height=0.6, color=color(number), label=label)
                left += width
            axes.annotate(
                size(left * GIB), (left, height), (4, 0), textcoords="offset points", va="center", fontsize=7
            )
        axes.axvline(available, color=_INK, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(phases)), phases[::-1])
        axes.set_xlim(0, 1.15 * max(available, need.peak_bytes / GIB))
        axes.grid(visible=False)
        axes.set_xlabel(
            f"GiB of {need.resource} on {plan.shape}; the line: {size(need.available_bytes)} that there are"
        )
        handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        order = [name for name in need.components if name in handles]
        axes.figure.legend(
            [handles[name] for name in order], order, loc="outside lower center", ncols=3, fontsize=7
        )

    label = ", ".join(f"{phase} {size(sum(need.phases[phase].values()))}" for phase in phases)
    return standalone(picture(draw, f"{plan.recipe}: {need.resource} by phase: {label}", height=3.6))


def standalone(svg: str) -> str:
    """Return a picture of a page as the content of an SVG file, with colours and a font of its own."""
    colors = "--ink: #1c1c1c; --muted: #5a5a5a; --rule: #cccccc; --blue: #0072b2; --orange: #e69f00"
    head = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    style = f"<style>svg {{ {colors}; background: #ffffff; font-family: sans-serif }}</style>"
    opened, _, rest = svg.partition(">")
    return f"{head}{opened.removeprefix('<svg ')}>{style}{rest}\n"


def color(number: int) -> str:
    """Return the colour of the planned component with this number, in the chart and in the table next to
    it."""
    return PALETTE[number % len(PALETTE)]


def size(count: float) -> str:
    """Return a number of bytes as text, such as 1.41 GiB."""
    for unit, bytes_in_it in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= bytes_in_it:
            return (
                f"{count / bytes_in_it:.3g} {unit}"
                if count < 1000 * bytes_in_it
                else f"{count / bytes_in_it:,.0f} {unit}"
            )
    return f"{count:.0f} bytes"


def _curve(points: Sequence[tuple[float, float]], label: str) -> str:
    steps, values = thinned(points)

    def draw(axes: "Axes") -> None:
        axes.plot(steps, values, color=BLUE)
        axes.set_ylim(bottom=0)
        by_step(axes)
        axes.yaxis.set_major_formatter("{x:g}")

    return picture(draw, f"{label} {max(values, default=0):.2g}")


def by_step(axes: "Axes") -> None:
    """Label the horizontal axis with optimizer steps."""
    axes.set_xlabel("optimizer step")
    axes.locator_params(axis="x", integer=True)


def thinned(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return both columns of a curve, as means of equal intervals if it has many points."""
    interval = -(-len(points) // _POINTS) or 1
    groups = [points[start : start + interval] for start in range(0, len(points), interval)]
    columns = [[sum(point[axis] for point in group) / len(group) for group in groups] for axis in (0, 1)]
    return columns[0], columns[1]


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and its neighbours, up to `reach` on both sides."""
    # Windows shrink symmetrically towards both ends: windows cut on one side would bend the curve there.
    reaches = [min(reach, at, len(values) - 1 - at) for at in range(len(values))]
    windows = [values[at - around : at + around + 1] for at, around in enumerate(reaches)]
    return [sum(window) / len(window) for window in windows]


def picture(draw: Callable[["Axes"], None], label: str, height: float = 2.6) -> str:
    """Return one SVG element, 5.2 inches wide and `height` inches high; `label` describes it to screen
    readers."""
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
    # Several charts share a page: unused ids would be repeated.
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)
    # Use the page's own font.
    svg = re.sub(r"font: (\S+) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]*; *", "", svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, f"var({variable})")
    head = re.search(r'viewBox="[^"]*"', svg)
    assert head
    return f'<svg role="img" aria-label="{escape(label)}" {head[0]}>{svg[svg.index(">") + 1 :]}'
