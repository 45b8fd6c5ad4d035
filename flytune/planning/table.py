"""Tables of plans, rankings and calibrations for a terminal."""

import io
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from flytune.console import tables
from flytune.errors import printable
from flytune.hardware.shapes import GIB
from flytune.planning import document
from flytune.planning import ranking as planning_ranking
from flytune.planning.calibration import Factor
from flytune.planning.ranking import By, Ranking
from flytune.recipe import Recipe
from flytune.records import Comparison, Loading, Need, Plan
from flytune.sentences import counted

ROWS = 12
"""Number of rows of a ranking that are shown."""
_COLORS = {"fits": "green", "tight": "yellow", "does not fit": "red"}


def show(plan: Plan, console: Console) -> None:
    """Show the needs of a plan by phase, the verdict, time and price."""
    tables.show(
        _memory(plan.memory, f"{plan.recipe} on {plan.shape}: {plan.memory.resource}, GiB by phase"), console
    )
    tables.show(_resources(plan), console)
    binding = plan.binding
    console.print(
        f"[bold {_COLORS[plan.verdict]}]{plan.verdict}[/]: {binding.resource} is the scarcest, "
        f"{_gib(binding.margin_bytes)} GiB ({1 - binding.share:.0%}) to spare in the phase "
        f"{binding.peak_phase}, most of it {binding.largest[0]}",
        highlight=False,
    )
    console.print(
        f"{plan.nodes} x {counted(plan.processes, 'process', 'processes')} ({plan.accelerator}), "
        f"${plan.price_per_hour:.2f} an hour; trains "
        f"{plan.trained_parameters / 1e6:,.1f}M parameters, the base has {plan.total_parameters / 1e6:,.1f}M",
        highlight=False,
    )
    if plan.tokens_per_second:
        _show_time(plan, console)
    elif plan.accelerator == "cpu":
        console.print(
            "time: not forecast on a CPU, whose speed is not in accelerators.yaml; the lines of a run's "
            "first steps say it",
            highlight=False,
        )
    for reason in plan.reasons:
        console.print(f"- {printable(reason)}", highlight=False, markup=False)


def as_html(plan: Plan) -> str:
    """Return the same as a page for Flyte's console, without external files."""
    console = Console(record=True, file=io.StringIO(), width=120)
    show(plan, console)
    return console.export_html(inline_styles=True)


def _memory(need: Need, title: str) -> Table:
    table = Table(title=title, title_justify="left", show_footer=True)
    table.add_column(f"by the {need.engine}", footer="needed")
    for phase, parts in need.phases.items():
        table.add_column(phase, justify="right", footer=_gib(sum(parts.values())))
    for name in need.components:
        table.add_row(name, *(_gib(parts.get(name, 0)) for parts in need.phases.values()))
    return table


def _resources(plan: Plan) -> Table:
    table = Table(title="all resources, GiB by phase", title_justify="left", pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in (*plan.memory.phases, "has", "used"):
        table.add_column(column, justify="right", no_wrap="step" not in column)
    for need in plan.needs:
        phases = (sum(need.phases.get(phase, {}).values()) for phase in plan.memory.phases)
        sizes = (
            f"{size / GIB:,.1f}" if 0 < size < 100 * GIB else _gib(size)
            for size in (*phases, need.available_bytes)
        )
        table.add_row(need.resource, *sizes, f"{need.share:.0%}")
    return table


def _show_time(plan: Plan, console: Console) -> None:
    seconds = sum(plan.step_seconds.values())
    table = Table(title="forecast of one step", title_justify="left", show_footer=True)
    table.add_column("part", footer="a step")
    table.add_column("seconds", justify="right", footer=f"{seconds:.2f}")
    for part, taken in sorted(plan.step_seconds.items(), key=lambda item: -item[1]):
        table.add_row(part, f"{taken:.3f}")
    tables.show(table, console)
    low, rate, high = plan.tokens_per_second
    console.print(
        f"{rate:,.0f} tokens per second on all GPUs ({_likely(plan, low, high)}); a billion tokens take "
        f"{1e9 / rate / 3600:,.1f} hours and cost {_dollars(plan.price_per_billion_tokens or 0.0)}",
        highlight=False,
    )
    if plan.hours:
        hours = [_duration(value) for value in plan.hours]
        price = [_dollars(value) for value in plan.price]
        console.print(
            f"[bold]{counted(plan.steps or 0, 'step takes', 'steps take')} {hours[1]}, for {price[1]}[/] "
            f"(likely {hours[0]} to {hours[2]}, "
            f"{price[0]} to {price[2]}), every sample as long as data.max_length; without start-up, loading "
            "and saving",
            highlight=False,
        )
    else:
        console.print("hours and price of the run: say how many samples it has (--samples)", highlight=False)
    if plan.loading:
        _show_loading(plan, plan.loading, console)


def _likely(plan: Plan, low: float, high: float) -> str:
    """Return the interval of tokens a second with its evidence, and the one after a run of the same model
    there."""
    text = f"likely {low:,.0f} to {high:,.0f}"
    if interval := plan.intervals.get("tokens_per_second"):
        text += f", as for {interval.coverage:.0%} of {counted(interval.held_out, 'published run')}"
    if after := plan.intervals.get("after_a_run"):
        text += (
            f"; after a run of this model on {plan.shape} and `flytune calibrate` "
            f"{after.low / after.value - 1:+.0%} to "
        )
        text += f"{after.high / after.value - 1:+.0%} of its figure"
    return text


def _show_loading(plan: Plan, loading: Loading, console: Console) -> None:
    """Show the time to load the model, and with it the time and the price of a run of one attempt."""
    parts = ", ".join(f"{_duration(seconds / 3600)} from {place}" for place, seconds in loading.parts.items())
    total = ""
    if plan.hours:
        hours = plan.hours[1] + loading.seconds / 3600
        total = (
            f"; with it, the run takes {_duration(hours)} and costs "
            f"{_dollars(plan.price[1] + plan.loading_price)}"
        )
    console.print(
        f"loading {loading.bytes / 1e9:,.1f} GB of weights on a cluster takes "
        f"{_duration(loading.seconds / 3600)} and costs {_dollars(plan.loading_price)} in each attempt: "
        f"{parts}{total}",
        highlight=False,
    )


def show_ranking(recipe: Recipe, ranking: Ranking, plans: list[Plan], by: By, console: Console) -> None:
    """Show the best ways to run a recipe, a line each, and the price of the second shape."""
    order = "cheapest first" if by == "price" else "fastest first"
    table = Table(title=f"{recipe.name}, {order}", title_justify="left", pad_edge=False)
    for column in ("shape", "sharding"):
        table.add_column(column, no_wrap=True)
    for column in ("recomputes", "micro", "GiB", "tokens/s", "$/1e9"):
        table.add_column(column, justify="right", no_wrap=True)
    for fit, plan in zip(ranking.fits, plans, strict=False):
        sharding = fit.recipe.sharding
        table.add_row(
            plan.shape,
            sharding.name + (f" {sharding.offload}" if sharding.offload != "none" else ""),
            "yes" if fit.recipe.training.activation_checkpointing else "no",
            f"{plan.per_device_train_batch_size} x {plan.gradient_accumulation_steps}",
            f"{plan.memory.peak_bytes / GIB:.1f}" + (" tight" if plan.verdict == "tight" else ""),
            f"{plan.tokens_per_second[1]:,.0f}" if plan.tokens_per_second else "not known",
            _dollars(plan.price_per_billion_tokens) if plan.price_per_billion_tokens else "",
        )
    tables.show(table, console)
    summary = (
        f"{counted(ranking.looked_at, 'candidate')} in {ranking.seconds:.1f} s; "
        f"{counted(ranking.ways, 'way fits', 'ways fit')}, at most two a shape are shown"
    )
    change = planning_ranking.changes(
        recipe, ranking.fits[0].recipe.model_copy(update={"hardware": recipe.hardware})
    )
    console.print(
        f"{summary}. For the first write hardware.shape: {plans[0].shape}"
        + (f", {change}" if change else ""),
        highlight=False,
        markup=False,
    )
    if runner_up := _runner_up(plans):
        console.print(runner_up, highlight=False, markup=False)


def _runner_up(plans: list[Plan]) -> str:
    """Return a sentence on the price of the best way on another shape, with the first run's hours and price
    if known."""
    first, second = plans[0], next((plan for plan in plans if plan.shape != plans[0].shape), plans[0])
    if second is first:
        return ""
    if not (first.price_per_billion_tokens and second.price_per_billion_tokens):
        return ""
    price, time = second.price_per_billion_tokens, first.tokens_per_second[1] / second.tokens_per_second[1]
    run = "the run"
    if first.hours and second.hours:
        run = f"the run, of {_duration(first.hours[1])} for {_dollars(first.price[1])},"
    return (
        f"On the runner-up among shapes, {second.shape}, {run} would cost "
        f"{price / first.price_per_billion_tokens:.2f} times as much and take {time:.2f} times as long."
    )


def ranking_json(recipe: Recipe, ranking: Ranking, plans: list[Plan]) -> str:
    """Return the same as JSON: a list, best first, of changes to the recipe and the resulting plans."""
    ways = [
        {"change": planning_ranking.changes(recipe, fit.recipe), "plan": document.of(plan)}
        for fit, plan in zip(ranking.fits, plans, strict=False)
    ]
    return json.dumps(
        {
            "version": document.VERSION,
            "looked_at": ranking.looked_at,
            "seconds": ranking.seconds,
            "ways": ways,
        },
        indent=2,
    )


def show_calibration(comparisons: Sequence[Comparison], rows: Sequence[Factor], console: Console) -> None:
    """Show each run, measured over planned, and the resulting factors."""
    table = Table(title="measured, of what was planned", title_justify="left")
    for column in ("run", "shape", "peak GiB", "planned", "memory", "speed", ""):
        table.add_column(column)
    for comparison in comparisons:
        measured, planned = (
            max(sizes.values(), default=0) for sizes in (comparison.measured_bytes, comparison.planned_bytes)
        )
        ratios = [
            f"{ratio:.2f}" if ratio else "" for ratio in (comparison.memory_ratio, comparison.speed_ratio)
        ]
        used = "" if comparison.full_length else "left out: shorter than planned"
        table.add_row(
            tables.plain(comparison.recipe),
            tables.plain(comparison.shape),
            _gib(measured),
            _gib(planned),
            *ratios,
            used,
        )
    tables.show(table, console)
    for row in rows:
        text = f"{row.name}: memory x {row.memory:.2f}, speed x {row.speed:.2f} (median of {row.runs})"
        console.print(printable(text), highlight=False, markup=False)


def _gib(size: float) -> str:
    if not size:
        return ""
    return f"{size / GIB:,.2f}" if 0 < size < 100 * GIB else f"{size / GIB:,.0f}"


def _duration(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} hours"
    return f"{60 * hours:.0f} minutes" if hours >= 1 / 30 else f"{3600 * hours:.0f} seconds"


def _dollars(value: float) -> str:
    return f"${value:,.0f}" if value >= 100 else f"${value:,.2f}"
