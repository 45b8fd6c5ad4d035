"""Two plans side by side: what changes in memory, time and price, by component and part."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from flytune.console import tables
from flytune.errors import printable
from flytune.hardware.shapes import GIB
from flytune.planning import document
from flytune.recipe import Recipe
from flytune.records import Plan

_NOT_COMPARED = ("name", "description")
"""Fields of a recipe that change nothing in a plan."""
_LEAST = 0.005
"""Smallest change, in GiB or in the unit of the column, that a table shows."""


class Change(NamedTuple):
    """A figure of two plans; 0 where a plan does not have it."""

    name: str
    unit: str
    before: float
    after: float

    @property
    def more(self) -> float:
        return self.after - self.before


def fields(before: Recipe, after: Recipe) -> list[str]:
    """Return the fields in which two recipes differ, with both values, as `data.max_length: 1024 -> 2048`."""
    return list(_differing(before.model_dump(mode="json"), after.model_dump(mode="json"), ""))


def _differing(before: Mapping[str, Any], after: Mapping[str, Any], section: str) -> Iterator[str]:
    for name in dict.fromkeys([*before, *after]):
        earlier, later = before.get(name), after.get(name)
        if earlier == later or (not section and name in _NOT_COMPARED):
            continue
        if isinstance(earlier, dict) and isinstance(later, dict):
            yield from _differing(earlier, later, f"{section}{name}.")
        else:
            yield f"{section}{name}: {json.dumps(earlier)} -> {json.dumps(later)}"


def layout(before: Plan, after: Plan) -> list[str]:
    """Return what the plans decide differently: shape and micro batch."""
    lines = [f"planned shape: {before.shape} -> {after.shape}"] if before.shape != after.shape else []
    earlier, later = (
        f"{plan.per_device_train_batch_size} x {plan.gradient_accumulation_steps}" for plan in (before, after)
    )
    return [
        *lines,
        *([f"planned micro batch x accumulation: {earlier} -> {later}"] if earlier != later else []),
    ]


def memory(before: Plan, after: Plan) -> list[Change]:
    """Return the components of GPU (or process) memory at each plan's peak, largest changes first, and the
    peak."""
    earlier, later = (plan.memory.phases[plan.memory.peak_phase] for plan in (before, after))
    parts = [
        Change(name, "GiB", earlier.get(name, 0) / GIB, later.get(name, 0) / GIB)
        for name in {**earlier, **later}
    ]
    return [*_sorted(parts), Change("peak", "GiB", sum(earlier.values()) / GIB, sum(later.values()) / GIB)]


def phases(before: Plan, after: Plan) -> list[Change]:
    """Return what each phase needs of GPU (or process) memory."""
    earlier, later = before.memory.phases, after.memory.phases
    return [
        Change(
            phase, "GiB", sum(earlier.get(phase, {}).values()) / GIB, sum(later.get(phase, {}).values()) / GIB
        )
        for phase in dict.fromkeys([*earlier, *later])
    ]


def time(before: Plan, after: Plan) -> list[Change]:
    """Return the seconds of a step by part, largest changes first, and of all; none if a plan has no time."""
    earlier, later = before.step_seconds, after.step_seconds
    if not earlier or not later:
        return []
    parts = [
        Change(name, "s", earlier.get(name, 0.0), later.get(name, 0.0))
        for name in dict.fromkeys([*earlier, *later])
    ]
    return [*_sorted(parts), Change("a step", "s", sum(earlier.values()), sum(later.values()))]


def price(before: Plan, after: Plan) -> list[Change]:
    """Return the price of an hour, the parts of a billion tokens' price, and speed, hours and price if they
    are known."""
    earlier, later = document.of(before), document.of(after)
    changes = [Change("an hour", "$", before.price_per_hour, after.price_per_hour)]
    if before.tokens_per_second and after.tokens_per_second:
        changes.append(
            Change("tokens per second", "", before.tokens_per_second[1], after.tokens_per_second[1])
        )
        parts, others = earlier["parts_of_a_billion_tokens"], later["parts_of_a_billion_tokens"]
        changes += _sorted(
            [
                Change(f"billion tokens: {name}", "$", parts.get(name, 0.0), others.get(name, 0.0))
                for name in {**parts, **others}
            ]
        )
        changes.append(
            Change(
                "billion tokens", "$", earlier["price_per_billion_tokens"], later["price_per_billion_tokens"]
            )
        )
    if before.hours and after.hours:
        changes.append(Change("hours of the run", "h", before.hours[1], after.hours[1]))
        changes.append(Change("the run", "$", before.price[1], after.price[1]))
    return changes


def _sorted(changes: list[Change]) -> list[Change]:
    return sorted(changes, key=lambda change: -abs(change.more))


def show(recipes: tuple[Recipe, Recipe], plans: tuple[Plan, Plan], console: Console) -> None:
    """Show the fields that differ and a table each of memory, time and price."""
    before, after = plans
    for line in [*(fields(*recipes) or ["the recipes differ in nothing"]), *layout(*plans)]:
        console.print(printable(line), highlight=False, markup=False)
    at = [f"{plan.memory.resource} on {plan.shape}, {plan.memory.peak_phase}" for plan in plans]
    for title, changes in (
        (f"{at[0]}; {at[1]}" if at[0] != at[1] else at[0], memory(before, after)),
        ("by phase", phases(before, after)),
        ("a step", time(before, after)),
        ("price", price(before, after)),
    ):
        if changes:
            tables.show(_table(title, recipes, changes), console)
    console.print(f"verdict: {before.verdict} -> {after.verdict}", highlight=False)


def _table(title: str, recipes: tuple[Recipe, Recipe], changes: list[Change]) -> Table:
    table = Table(title=title, title_justify="left")
    names = [tables.plain(recipe.name) for recipe in recipes]
    for column in ("", *(names if names[0] != names[1] else ("before", "after")), "change", "%"):
        table.add_column(column, justify="right" if column else "left")
    for change in changes:
        if max(abs(change.before), abs(change.after)) < _LEAST:
            continue
        share = f"{change.more / change.before:+.0%}" if change.before and abs(change.more) >= _LEAST else ""
        more = f"{change.more:+,.2f}" if abs(change.more) >= _LEAST else ""
        unit = f" ({change.unit})" if change.unit else ""
        table.add_row(change.name + unit, f"{change.before:,.2f}", f"{change.after:,.2f}", more, share)
    return table


def as_json(recipes: tuple[Recipe, Recipe], plans: tuple[Plan, Plan]) -> str:
    """Return the same as JSON, with both plans."""
    tables_of = {"memory": memory, "phases": phases, "time": time, "price": price}
    content = {
        "version": document.VERSION,
        "fields": fields(*recipes),
        "planned": layout(*plans),
        **{
            name: [change._asdict() for change in changes_of(*plans)]
            for name, changes_of in tables_of.items()
        },
        "plans": [document.of(plan) for plan in plans],
    }
    return json.dumps(content, indent=2) + "\n"
