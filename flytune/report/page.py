"""The report of a run, report.html: one self-contained page."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flytune.recipe import Recipe
from flytune.records import LabelReward, Manifest, Metrics, Part, Plan, Preference, RewardScore, Score, TrainingResult, Wins
from flytune.records.lineage import Lineage
from flytune.records.training import PARTS
from flytune.report import charts, preference_charts, task_table

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
    xray: str = "",
) -> str:
    """Return the report as one self-contained HTML page; everything from the data is escaped.

    Args:
        broken: a sentence for each failed guard (evaluation.guards.broken).
        lineage: the runs that made the base model.
        xray: HTML of xray.section.
    """
    return environment(escape=True).get_template("report.html.jinja").render(
        recipe=recipe,
        plan=plan,
        manifest=manifest,
        training=training,
        metrics=metrics,
        xray=xray,
        charts=charts,
        preference_charts=preference_charts,
        task_table=task_table,
        broken=broken,
        lineage=lineage.runs if lineage else [],
        peak=max((step.memory_bytes for step in training.steps), default=0),
        reserved=max((step.memory_reserved_bytes or 0 for step in training.steps), default=0),
        gpu_use=gpu_use(training),
        times=times(training),
        trained_steps=max(1, training.steps[-1].step - training.resumed_from_step) if training.steps else 1,
    )  # fmt: skip


def times(training: TrainingResult) -> dict[str, float]:
    """Sum the seconds of all logged steps, by part."""
    return {part: sum(getattr(step, f"{part}_seconds") for step in training.steps) for part in PARTS}


def gpu_use(training: TrainingResult) -> str:
    """Return mean utilization and power, and the highest temperature, of the GPUs as a phrase; empty if none was sampled."""
    found = [(step.seconds, step.gpu) for step in training.steps if step.gpu]

    def mean(values: list[tuple[float, float | None]]) -> float | None:
        known = [(seconds, value) for seconds, value in values if value is not None]
        return sum(seconds * value for seconds, value in known) / sum(seconds for seconds, _ in known) if known else None

    figures = [
        (mean([(seconds, gpu.utilization) for seconds, gpu in found]), "{:.0f} %"),
        (mean([(seconds, gpu.power_watts) for seconds, gpu in found]), "{:.0f} W"),
        (max((gpu.temperature_max for _, gpu in found if gpu.temperature_max is not None), default=None), "at most {:.0f} °C"),
    ]
    return ", ".join(form.format(value) for value, form in figures if value is not None)


def environment(escape: bool) -> Any:
    """Return the Jinja environment of Flytune's templates, with the filters that the report and the model card share."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {"number": number, "number_of": "{:,}".format, "size": charts.size, "price": price}
    found.filters |= {"interval": interval, "duration": duration, "cell": cell, "percent": percent}
    found.globals |= {"verdict": verdict, "share": share}
    return found


def verdict(metrics: Metrics) -> str:
    """Return the result as a sentence."""
    if metrics.reward:
        return _reward_verdict(metrics.reward)
    if metrics.preference:
        return _preference_verdict(metrics.preference)
    base, tuned = metrics.base.perplexity, metrics.tuned.perplexity
    direction = "falls" if tuned < base else "rises" if tuned > base else "changes"
    change = f"Held-out perplexity {direction} from {number(base)} to {number(tuned)}"
    if metrics.samples < 2:
        return f"{change}, but a single held-out sample is no evidence."
    if metrics.is_better:
        return f"{change}, a significant improvement."
    if metrics.loss_difference_low > 0:
        return f"{change}, significantly worse."
    return f"{change}, which is not a significant difference."


def _reward_verdict(found: RewardScore) -> str:
    pairs = f"{percent(found.accuracy)} of {found.pairs} held-out pairs"
    chosen = f"The reward model gives the chosen answer of {pairs} the larger reward"
    if found.pairs < 2:
        return f"{chosen}, but a single pair is no evidence."
    if found.accuracy_low > 0.5:
        return f"{chosen}, significantly more than half."
    if found.accuracy_high < 0.5:
        return f"{chosen}, significantly less than half."
    return f"{chosen}, which is not significantly different from half."


def _preference_verdict(found: Preference) -> str:
    better, pairs = "chosen", f"{found.pairs} held-out pairs"
    if found.labels:
        better, pairs = "desirable", f"all pairs of {found.labels[0].answers} and {found.labels[1].answers} undesirable answers"
    change = (
        f"The tuned model finds the {better} answer of {percent(found.tuned)} of {pairs} more probable, the base model that of "
        f"{percent(found.base)}; its reward is larger in {percent(found.accuracy)}"
    )
    if found.pairs < 2:
        return f"{change}, but a single pair is no evidence."
    if found.margin_low > 0:
        return f"{change}, and the mean margin of {number(found.margin)} is significantly above zero."
    if found.margin_high < 0:
        return f"{change}, and the mean margin of {number(found.margin)} is significantly below zero."
    return f"{change}; the mean margin of {number(found.margin)} is not significantly different from zero."


def percent(part: float) -> str:
    """Return a share as a percentage such as `62.5 %`."""
    return f"{100 * part:.3g} %"


def number(value: float) -> str:
    """Format with at least three significant digits, thousands separators and a real minus: 21.3, −0.620, 12,346."""
    if abs(value) >= 1000:
        text = f"{value:.3g}" if abs(value) >= 1e9 else f"{value:,.0f}"
    else:
        text = f"{value:.1f}" if abs(value) >= 100 else f"{value:#.3g}"
    return text.replace("-", "−")


def interval(score: Score | Metrics | Part | Preference | LabelReward | Wins, name: str) -> str:
    """Return the 95 % interval of a field: `20.1 to 22.6`."""
    low, high = getattr(score, f"{name}_low"), getattr(score, f"{name}_high")
    return "unknown" if high >= sys.float_info.max else f"{number(low)} to {number(high)}"


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
    return " ".join(text.split()).replace("|", "\\|")


def share(part: float, whole: float) -> str:
    """Return a percentage such as `3.5 %`."""
    return f"{100 * part / whole:.3g} %" if whole else "none"
