"""Results of a sweep: which points can run, how they compare, and which one is best."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from rich import box
from rich.console import Console
from rich.table import Table

from flytune.console import tables
from flytune.errors import FlytuneError, RecipeError, printable
from flytune.evaluation import guards
from flytune.failures import kind_of
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.records import Metrics, Plan, Score, TrainingResult
from flytune.report import page as report_page
from flytune.schema import Record, Strict
from flytune.sweeps import parallel_coordinates
from flytune.sweeps.grid import Points, shown, value_at
from flytune.sweeps.parallel_coordinates import Line

_OTHER_SCALES = ("data", "model", "evaluation")
"""Sections of the recipe that change the scored samples or their tokens."""
WIDTH = 140
REPORT, BEST = "report.html", "best.yaml"


class Outcome(Strict):
    """Outcome of one point."""

    name: str
    """Name of its recipe."""
    values: list[Any]
    """Values of the sweep's fields, in their order."""
    tuned: Score | None = None
    """Score on the held-out samples; None if it failed."""
    seconds: float = 0.0
    """Seconds of training."""
    price: float = 0.0
    """Price of training, in the currency of shapes.yaml."""
    artifact: str = ""
    """Address of the artifact."""
    reason: str = ""
    """Reason of the failure."""
    broken: list[str] = Field(default=[])
    """Violated conditions of evaluation.must_not_fall; with any, it cannot be the best point."""

    @property
    def shown(self) -> list[str]:
        """Return its values as they are written in a recipe."""
        return [shown(value) for value in self.values]


class Sweep(Record):
    """Content of sweep.json: all points, including failed ones."""

    recipe: str
    """Name of the sweep's recipe."""
    fields: list[str]
    outcomes: list[Outcome]
    best: str | None
    """Name of the point with the lowest held-out loss; the first one of equal ones."""
    as_good: list[str] = Field(default=[])
    """Names of the points whose 95 % intervals overlap with that of the best one."""
    warnings: list[str] = Field(default=[])


def check(concurrency: int, min_success_ratio: float) -> None:
    """Check the settings of a sweep.

    Raises:
        RecipeError: a setting is out of range.
    """
    if not 0 < min_success_ratio <= 1:
        raise RecipeError(f"min_success_ratio: {min_success_ratio:g}; it is above 0, and 1 at most")
    if concurrency < 0:
        raise RecipeError(f"concurrency: {concurrency}; give how many points run at a time, 0 for all")


def plan_points(points: Points, min_success_ratio: float, plan: Callable[[Recipe], Any] = planner.make) -> Points:
    """Return the points, with a reason for each that cannot run: the error that `plan` raises.

    Raises:
        RecipeError: too few can run to reach the ratio, with all reasons.
    """
    judged = []
    for point in points.points:
        try:
            plan(point.recipe)
            judged.append(point)
        except FlytuneError as error:
            if kind_of(error).recoverable:  # another attempt may succeed
                raise
            judged.append(point.model_copy(update={"refused": str(error)}))
    found = points.model_copy(update={"points": judged})
    if len(found.runnable) < (needed := least(points, min_success_ratio)):
        reasons = [f"{point.recipe.name}: {_line(point.refused)}" for point in judged if point.refused]
        where = f"sweep of {points.recipe}: {len(found.runnable)} of {len(judged)} points can run, {needed} must succeed"
        raise RecipeError.of(where, reasons)
    return found


def least(points: Points, min_success_ratio: float) -> int:
    """Return how many points must succeed; refused ones count as failed."""
    return math.ceil(len(points.points) * min_success_ratio - 1e-9)


def outcome(
    recipe: Recipe, values: list[Any], plan: Plan, training: TrainingResult, metrics: Metrics, artifact: str
) -> Outcome:
    """Return the outcome of a point that succeeded."""
    price = plan.price_per_hour * training.seconds / 3600
    return Outcome(
        name=recipe.name,
        values=values,
        tuned=metrics.tuned,
        seconds=training.seconds,
        price=price,
        artifact=artifact,
        broken=guards.broken(recipe, metrics),
    )


def compare(points: Points, succeeded: Mapping[str, Outcome], reasons: Mapping[str, str]) -> Sweep:
    """Return all outcomes in the points' order, and the best point. `reasons`: the known reasons of failed points, by name."""
    outcomes = []
    for point in points.points:
        name = point.recipe.name
        reason = point.refused or reasons.get(name) or "no reason is known; see the console"
        values = [value_at(point.recipe, field) for field in points.fields]
        outcomes.append(succeeded.get(name) or Outcome(name=name, values=values, reason=reason))
    scored = [(one, one.tuned) for one in outcomes if one.tuned and math.isfinite(one.tuned.loss) and not one.broken]
    best, score = min(scored, key=lambda pair: pair[1].loss, default=(None, None))
    as_good = [one.name for one, other in scored if one is not best and score and other.loss_low <= score.loss_high]
    varied = [field for field in points.fields if field.split(".")[0] in _OTHER_SCALES]
    warning = (
        f"{', '.join(varied)}: points may be scored on different samples or tokens, so that their losses are not comparable"
    )
    return Sweep(
        recipe=points.recipe,
        fields=points.fields,
        outcomes=outcomes,
        best=best.name if best else None,
        as_good=as_good,
        warnings=[warning] if varied else [],
    )


def too_few(sweep: Sweep, needed: int) -> str:
    """Return the error of a sweep of which fewer than `needed` points have succeeded, with all reasons."""
    failed = [f"  {one.name}: {_line(one.reason)}" for one in sweep.outcomes if not one.tuned]
    succeeded = len(sweep.outcomes) - len(failed)
    where = f"sweep of {sweep.recipe}: {succeeded} of {len(sweep.outcomes)} points have succeeded, {needed} must"
    return "\n".join([f"{where} (min_success_ratio); the table is in this task's deck and log", *failed])


def verdict(sweep: Sweep) -> str:
    """Return a sentence about the best point."""
    failed = sum(not one.tuned for one in sweep.outcomes)
    some = f" {failed} of {len(sweep.outcomes)} failed." if failed else ""
    best = next((one for one in sweep.outcomes if one.name == sweep.best), None)
    if best is None or best.tuned is None:
        return f"No point has a held-out loss.{some}"
    what = ", ".join(f"{field} {value}" for field, value in zip(sweep.fields, best.shown, strict=True))
    said = f"Best: {best.name} ({what}), held-out loss {report_page.number(best.tuned.loss)}."
    if sweep.as_good:
        said += f" Within chance of it, by their 95 % intervals: {', '.join(sweep.as_good)}."
    return said + some


def ranked(sweep: Sweep) -> list[Outcome]:
    """Return the outcomes by loss, failed ones last."""
    return sorted(sweep.outcomes, key=lambda one: one.tuned.loss if one.tuned else math.inf)


def show(sweep: Sweep, console: Console) -> None:
    """Print the table, the reasons of failures, and the verdict."""
    table = Table(title=tables.plain(f"Sweep of {sweep.recipe}"), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("point", no_wrap=True)
    for name in short(sweep.fields):
        table.add_column(tables.plain(name))
    for name in ("loss", "95 % interval", "perplexity", "training"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in ranked(sweep):
        style = "bold" if one.name == sweep.best else "" if one.tuned else "red"
        table.add_row(tables.plain(one.name), *map(tables.plain, one.shown), *_cells(one), style=style)
    tables.show(table, console)
    for one in sweep.outcomes:
        if not one.tuned:
            console.print(printable(f"{one.name} failed: {_line(one.reason)}"), markup=False, highlight=False, soft_wrap=True)
    for said in (*sweep.warnings, verdict(sweep)):
        console.print(said, markup=False, highlight=False, soft_wrap=True)


def log(sweep: Sweep) -> None:
    """Print the same on stderr, which is a pod's log."""
    show(sweep, Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH))


def html(sweep: Sweep) -> str:
    """Return the same with a plot, as one self-contained page."""
    lines = [Line(one.name, one.shown, one.tuned.loss if one.tuned else None) for one in sweep.outcomes]
    orders = [_order([one.values[at] for one in sweep.outcomes]) for at in range(len(sweep.fields))]
    picture = parallel_coordinates.draw(short(sweep.fields), orders, lines, "held-out loss", sweep.best)
    page = report_page.environment(escape=True).get_template("sweep.html.jinja")
    return page.render(sweep=sweep, ranked=ranked(sweep), said=verdict(sweep), picture=picture, line=_line, short=short)


def short(fields: Sequence[str]) -> list[str]:
    """Return the last parts of the fields, or the complete field if its last part is not unique."""
    last = [field.rpartition(".")[2] for field in fields]
    return [name if last.count(name) == 1 else field for name, field in zip(last, fields, strict=True)]


def write(sweep: Sweep, points: Points, folder: Path) -> None:
    """Write sweep.json, report.html and best.yaml, a recipe for `pyflyte run`, into a new folder."""
    folder.mkdir(parents=True)
    sweep.write(folder / "sweep.json")
    (folder / REPORT).write_text(html(sweep), encoding="utf-8")
    for recipe in points.runnable:
        if recipe.name == sweep.best:
            (folder / BEST).write_text(recipe.to_yaml(), encoding="utf-8")


def _order(values: Sequence[Any]) -> list[str]:
    """Return the distinct displayed values: numbers by size, others in their order."""
    if all(isinstance(value, int | float) for value in values):
        values = sorted(values)
    return list(dict.fromkeys(map(shown, values)))


def _cells(one: Outcome) -> list[str]:
    if not one.tuned:
        return ["failed", "", "", ""]
    return [
        report_page.number(one.tuned.loss),
        report_page.interval(one.tuned, "loss"),
        report_page.number(one.tuned.perplexity),
        report_page.duration(one.seconds),
    ]


def _line(reason: str) -> str:
    return " ".join(reason.split())
