"""The report of a run, report.html: one self-contained page."""

import html
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from flytune.models import heads
from flytune.recipe import Recipe
from flytune.records import Figure, Interval, Manifest, Metrics, Part, Plan, TrainingResult, Wins
from flytune.records.lineage import Lineage
from flytune.records.metrics import SINGLE_SAMPLE
from flytune.records.rollouts import Group
from flytune.records.training import PARTS
from flytune.report import charts, drawn_answers, figure_charts, task_chart
from flytune.report.pictures import Shown
from flytune.sentences import counted, counted_of

TEMPLATES = Path(__file__).parent / "templates"


def render(
    recipe: Recipe,
    plan: Plan,
    manifest: Manifest,
    training: TrainingResult,
    metrics: Metrics,
    *,
    broken: Sequence[str],
    lineage: Lineage | None = None,
    warnings: Sequence[str] = (),
    xray: str = "",
    rollouts: Sequence[Group] = (),
    pictures: Sequence[Sequence[Shown]] = (),
) -> str:
    """Return the report as one self-contained HTML page; everything from the data is escaped.

    Args:
        broken: a sentence for each failed guard (evaluation.guards.broken).
        lineage: the runs that made the base model.
        warnings: a sentence for each check of the prepared data that did not pass.
        xray: HTML of xray.section.
        rollouts: answers that the model has drawn in training.
        pictures: those of each prompt of the sample answers; empty of a model of text.
    """
    planned = training.as_planned(plan)
    return (
        environment(escape=True)
        .get_template("report.html.jinja")
        .render(
            recipe=recipe,
            head=heads.head_of(recipe),
            plan=plan,
            manifest=manifest,
            training=training,
            metrics=metrics,
            warnings=warnings,
            xray=xray,
            pictures=pictures or [[]] * len(metrics.answers),
            moments=drawn_answers.moments(recipe.objective, rollouts),
            charts=charts,
            figure_charts=figure_charts,
            task_chart=task_chart,
            broken=broken,
            lineage=lineage.runs if lineage else [],
            planned=planned,
            peak=max((step.memory_bytes for step in planned.steps), default=0),
            reserved=max((step.memory_reserved_bytes or 0 for step in planned.steps), default=0),
            gpu_use=gpu_use(training),
            times=times(training),
            trained_steps=max(1, training.steps[-1].step - training.first_step) if training.steps else 1,
        )
    )


def times(training: TrainingResult) -> dict[str, float]:
    """Sum the seconds of all logged steps, by part."""
    return {part: sum(getattr(step, f"{part}_seconds") for step in training.steps) for part in PARTS}


def gpu_use(training: TrainingResult) -> str:
    """Return mean utilization and power, and the highest temperature, of the GPUs as a phrase; empty if none
    was sampled."""
    samples = [(step.seconds, step.gpu) for step in training.steps if step.gpu]

    def mean(values: list[tuple[float, float | None]]) -> float | None:
        known = [(seconds, value) for seconds, value in values if value is not None]
        return (
            sum(seconds * value for seconds, value in known) / sum(seconds for seconds, _ in known)
            if known
            else None
        )

    figures = [
        (mean([(seconds, gpu.utilization) for seconds, gpu in samples]), "{:.0f} %"),
        (mean([(seconds, gpu.power_watts) for seconds, gpu in samples]), "{:.0f} W"),
        (
            max((gpu.temperature_max for _, gpu in samples if gpu.temperature_max is not None), default=None),
            "at most {:.0f} °C",
        ),
    ]
    return ", ".join(form.format(value) for value, form in figures if value is not None)


@cache
def environment(escape: bool) -> Any:
    """Return the Jinja environment of Flytune's templates, with the filters that the report and the model
    card share."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "number": number,
        "number_of": "{:,}".format,
        "counted": counted,
        "counted_of": counted_of,
        "size": charts.size,
        "price": price,
    }
    environment.filters |= {
        "interval": interval,
        "share_interval": share_interval,
        "duration": duration,
        "cell": cell,
        "prose": prose,
        "code": code,
        "percent": percent,
    }
    environment.filters |= {"value": value, "range": shown, "apart": apart, "capitalized": capitalized}
    environment.globals |= {"verdict": verdict, "share": share}
    return environment


NOTHING_MEASURED = "No samples were held out, so nothing says whether tuning helped."
"""Result of a run without held-out data."""


def verdict(metrics: Metrics) -> str:
    """Return the result as a sentence: the most important figure, and if models differ by the one that
    compares them."""
    if not metrics.figures:
        return NOTHING_MEASURED
    first, compared = metrics.figures[0], metrics.compared
    after = quantity(first, first.tuned.value)
    if first.base is not None:
        rise, verb = first.tuned.value - first.base.value, "changes"
        if rise:
            verb = "rises" if rise > 0 else "falls"
        change = f"Held-out {first.title} {verb} from {quantity(first, first.base.value)} to {after}"
    else:
        change = f"Held-out {first.title} is {after}"
        if first.neutral is not None:
            change += f", and that of {first.neutral_model} {value(first, first.neutral)}"
    others = [figure for figure in metrics.figures if figure.is_paired and figure not in (first, compared)]
    more = "".join(
        f" {capitalized(figure.title)}: {quantity(figure, figure.tuned.value)} "
        f"({shown(figure, figure.tuned)})."
        for figure in others
    )
    if compared.better == "neither":
        return f"{change}; nothing shows which model is better."
    if metrics.samples < 2:
        return f"{change}, but {SINGLE_SAMPLE}.{doubts(metrics)}"
    significance = {
        "better": "a significant improvement",
        "worse": "significantly worse",
        "unclear": "which is not a significant difference",
    }
    doubtful = ", but doubtful" if metrics.doubts else ""
    return f"{change}, {significance[compared.outcome]}{doubtful}.{doubts(metrics)}{more}"


def doubts(metrics: Metrics) -> str:
    """Return a sentence on what makes the figures doubtful, with a space before it; empty if nothing does."""
    return f" In doubt: {'; '.join(metrics.doubts)}." if metrics.doubts else ""


def capitalized(text: str) -> str:
    """Return a title with a capital letter."""
    return text[:1].upper() + text[1:]


def value(figure: Figure, amount: float) -> str:
    """Return a value of a figure without its unit: `3.06`, `62.5 %`."""
    return percent(amount) if figure.is_share else number(amount)


def quantity(figure: Figure, amount: float) -> str:
    """Return a value of a figure with its unit: `3.06 nats per token`, `62.5 % of pairs`."""
    unit = figure.unit.removeprefix("share").strip()
    return f"{value(figure, amount)} {unit}".rstrip()


def shown(figure: Figure, interval: Interval) -> str:
    """Return the 95 % interval of a figure: `20.1 to 22.6`."""
    return (
        f"{value(figure, interval.low)} to {value(figure, interval.high)}" if interval.is_known else "unknown"
    )


def apart(figure: Figure, difference: Interval) -> str:
    """Return a difference with its interval: `+0.12 (0.08 to 0.16)`."""
    sign = "+" if difference.value > 0 else ""
    return f"{sign}{value(figure, difference.value)} ({shown(figure, difference)})"


def percent(part: float) -> str:
    """Return a share as a percentage such as `62.5 %`."""
    return f"{100 * part:.3g} %".replace("-", "−")


def number(value: float) -> str:
    """Format with at least three significant digits, thousands separators and a real minus: 21.3, −0.620,
    12,346."""
    if abs(value) >= 1000:
        text = f"{value:.3g}" if abs(value) >= 1e9 else f"{value:,.0f}"
    else:
        text = f"{value:.1f}" if abs(value) >= 100 else f"{value:#.3g}"
    return text.replace("-", "−")


def interval(score: Part | Wins, name: str) -> str:
    """Return the 95 % interval of a field: `20.1 to 22.6`."""
    low, high = getattr(score, f"{name}_low"), getattr(score, f"{name}_high")
    return "unknown" if high >= sys.float_info.max else f"{number(low)} to {number(high)}"


def share_interval(score: Part | Wins, name: str) -> str:
    """Return the 95 % interval of a share as percentages: `62.5 % to 100 %`."""
    return f"{percent(getattr(score, f'{name}_low'))} to {percent(getattr(score, f'{name}_high'))}"


def duration(seconds: float) -> str:
    """Return a time such as `47 s`, `5 min 57 s` or `2 h 7 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def price(dollars: float) -> str:
    """Return a price such as `$ 1.25`."""
    return f"$ {dollars:,.2f}" if dollars >= 0.01 or not dollars else "under $ 0.01"


def cell(text: str) -> str:
    """Return the text on one line, escaped for a cell of a Markdown table."""
    return prose(text)


def prose(text: str) -> str:
    """Return the text on one line of Markdown, which shows it as it is: no HTML, links, pictures, headings or
    tables."""
    line = re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
    return re.sub(r"^([-+#=~]|\d+[.)])", r"\\\1", line)


def code(text: str) -> str:
    """Return the text on one line, for a span of code in Markdown, which a backtick would end."""
    return " ".join(text.split()).replace("`", "'")


def share(part: float, whole: float) -> str:
    """Return a percentage such as `3.5 %`."""
    return f"{100 * part / whole:.3g} %" if whole else "none"
