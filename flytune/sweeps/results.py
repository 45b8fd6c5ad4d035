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
from flytune.recipe import Recipe
from flytune.records import Figure, Interval, Metrics, Plan, TrainingResult
from flytune.records.contents import SWEEP, seal
from flytune.report import page as report_page
from flytune.schema import Record, Strict
from flytune.sentences import counted, counted_of
from flytune.sweeps import comparison, parallel_coordinates
from flytune.sweeps.comparison import Scored
from flytune.sweeps.grid import Points, shown, value_at
from flytune.sweeps.parallel_coordinates import Line

WIDTH = 140
REPORT, BEST = "report.html", "best.yaml"


class Outcome(Strict):
    """Outcome of one point."""

    name: str
    """Name of its recipe."""
    values: list[Any]
    """Values of the sweep's fields, in their order."""
    scored: Scored = Field(default=Scored())
    """Figures on the held-out samples; none if it failed."""
    difference: Interval | None = None
    """Difference of its figure from the best point's, paired by sample; the intervals hold for all pairs of
    points together."""
    seconds: float = 0.0
    """Seconds of training, of all attempts."""
    price: float = 0.0
    """Price of the time for which all attempts of training held their machines, in the currency of
    shapes.yaml."""
    artifact: str = ""
    """Address of the artifact."""
    reason: str = ""
    """Reason of the failure."""
    broken: list[str] = Field(default=[])
    """Violated conditions of evaluation.must_not_fall; with any, it cannot be the best point."""

    @property
    def has_failed(self) -> bool:
        """True if it has no figures."""
        return not self.scored.figures

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
    figure: Figure | None = None
    """Figure that the points are ranked by; None if they share none."""
    best: str | None
    """Name of the point with the best figure; the first one of equal ones."""
    as_good: list[str] = Field(default=[])
    """Names of the points that are not significantly worse than the best one."""
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


def plan_points(points: Points, min_success_ratio: float, plan: Callable[[Recipe], Any]) -> Points:
    """Return the points, with a reason for each that cannot run: the error that `plan` raises.

    Raises:
        RecipeError: too few can run to reach the ratio, with all reasons.
    """
    planned_points = []
    for point in points.points:
        try:
            plan(point.recipe)
            planned_points.append(point)
        except FlytuneError as error:
            if kind_of(error).recoverable:  # another attempt may succeed
                raise
            planned_points.append(point.model_copy(update={"refused": str(error)}))
    planned = points.model_copy(update={"points": planned_points})
    needed = least(points, min_success_ratio)
    if len(planned.runnable) < needed:
        reasons = [
            f"{point.recipe.name}: {_line(point.refused)}" for point in planned.points if point.refused
        ]
        where = (
            f"sweep of {points.recipe}: {len(planned.runnable)} of "
            f"{counted(len(planned.points), 'point')} can run, {needed} must succeed"
        )
        raise RecipeError.of(where, reasons)
    return planned


def least(points: Points, min_success_ratio: float) -> int:
    """Return how many points must succeed; refused ones count as failed."""
    return math.ceil(len(points.points) * min_success_ratio - 1e-9)


def outcome(
    recipe: Recipe, values: list[Any], plan: Plan, training: TrainingResult, metrics: Metrics, artifact: str
) -> Outcome:
    """Return the outcome of a point that succeeded."""
    return Outcome(
        name=recipe.name,
        values=values,
        scored=Scored(
            figures=metrics.figures,
            scores=metrics.scores,
            doubts=metrics.doubts,
            scale={
                field: value_at(recipe, field) for figure in metrics.figures for field in figure.scaled_by
            },
        ),
        seconds=training.seconds,
        price=training.price(plan.price_per_hour),
        artifact=artifact,
        broken=guards.broken(recipe, metrics),
    )


def compare(points: Points, succeeded: Mapping[str, Outcome], reasons: Mapping[str, str]) -> Sweep:
    """Return all outcomes in the points' order, and the best point.

    Args:
        succeeded: outcomes of the points that succeeded, by name.
        reasons: the known reasons of failed points, by name.
    """
    outcomes = []
    for point in points.points:
        name = point.recipe.name
        reason = point.refused or reasons.get(name) or "no reason is known; see the console"
        values = [value_at(point.recipe, field) for field in points.fields]
        outcomes.append(succeeded.get(name) or Outcome(name=name, values=values, reason=reason))
    able = [outcome for outcome in outcomes if not outcome.has_failed and not outcome.broken]
    names, scored = [outcome.name for outcome in able], [outcome.scored for outcome in able]
    compared = comparison.compare(scored)
    differences = {names[number]: difference for number, difference in compared.differences.items()}
    figure = None
    if compared.figure is not None:  # without the values of the point that has it
        fields = {name: getattr(compared.figure, name) for name in Figure.model_fields}
        figure = Figure.model_validate(fields)
    return Sweep(
        recipe=points.recipe,
        fields=points.fields,
        outcomes=[
            outcome.model_copy(
                update={
                    "difference": differences.get(outcome.name),
                    # The artifacts have the scores of each sample.
                    "scored": outcome.scored.model_copy(update={"scores": None}),
                }
            )
            for outcome in outcomes
        ],
        figure=figure,
        best=None if compared.best is None else names[compared.best],
        as_good=[names[number] for number in compared.as_good],
        warnings=_warnings(names, scored, compared),
    )


def _warnings(names: list[str], scored: list[Scored], compared: comparison.PointComparison) -> list[str]:
    """List what is not comparable between the points, a line each."""
    if compared.figure is None:
        no_figure = "the points' objectives share no figure on one scale, so no point is the best"
        return [no_figure] if len(scored) > 1 else []
    doubts = dict.fromkeys(doubt for point in scored for doubt in point.doubts)
    warnings = [f"held-out figures are doubtful: {doubt}" for doubt in doubts]
    skipped = next((figure for figure in scored[0].figures if figure.is_paired), None)
    if skipped is not None and skipped.name != compared.figure.name:
        fields = [
            field for field in skipped.scaled_by if len({str(point.scale.get(field)) for point in scored}) > 1
        ]
        if fields:
            warnings.append(
                f"{', '.join(fields)} changes the scale of {skipped.title}, so points are compared by "
                f"{compared.figure.title}"
            )
    if compared.elsewhere:
        warnings.append(
            f"{', '.join(names[at] for at in compared.elsewhere)}: scored on other held-out samples or "
            "tokens than the best point, so that their figures are not comparable; name the same held-out "
            "data for all points (data.heldout_path)"
        )
    if compared.unpaired:
        warnings.append(
            f"{', '.join(names[at] for at in compared.unpaired)}: there are no scores of each sample to pair "
            "with the best point's, so intervals of both were compared; they overlap more often than a "
            "paired comparison would"
        )
    return warnings


def too_few(sweep: Sweep, needed: int) -> str:
    """Return the error of a sweep of which fewer than `needed` points have succeeded: all reasons, and the
    artifacts."""
    points = [
        f"  {outcome.name}: {_line(outcome.reason) if outcome.has_failed else outcome.artifact}"
        for outcome in sweep.outcomes
    ]
    succeeded = sum(not outcome.has_failed for outcome in sweep.outcomes)
    where = (
        f"sweep of {sweep.recipe}: {counted_of(succeeded, len(sweep.outcomes), 'point', 'has', 'have')} "
        f"succeeded, {needed} must"
    )
    return "\n".join([f"{where} (min_success_ratio); the table is in this task's deck and log", *points])


def verdict(sweep: Sweep) -> str:
    """Return a sentence about the best point."""
    number = sum(outcome.has_failed for outcome in sweep.outcomes)
    failed = f" {number} of {len(sweep.outcomes)} failed." if number else ""
    best = next((outcome for outcome in sweep.outcomes if outcome.name == sweep.best), None)
    figure = best.scored.figure(sweep.figure.name) if best and sweep.figure else None
    if best is None or figure is None:
        return f"No point has a figure to be compared by.{failed}"
    what = ", ".join(f"{field} {value}" for field, value in zip(sweep.fields, best.shown, strict=True))
    sentence = (
        f"Best: {best.name} ({what}), held-out {figure.title} "
        f"{report_page.quantity(figure, figure.tuned.value)}."
    )
    paired = [outcome for outcome in sweep.outcomes if outcome.difference]
    how = (
        "paired by sample, with 95 % intervals for all pairs of points together"
        if paired
        else "by their 95 % intervals"
    )
    if sweep.as_good:
        sentence += f" Within chance of it, {how}: {', '.join(sweep.as_good)}."
    elif paired:
        others = "the other point is" if len(paired) == 1 else f"the other {len(paired)} are"
        sentence += f" By more than chance {others} worse, {how}."
    return sentence + failed


def ranked(sweep: Sweep) -> list[Outcome]:
    """Return the outcomes, the best first, failed ones last."""

    def place(outcome: Outcome) -> tuple[bool, float]:
        figure = outcome.scored.figure(sweep.figure.name) if sweep.figure else None
        if sweep.figure is None or figure is None:
            return outcome.has_failed, math.inf
        value = figure.tuned.value
        return outcome.has_failed, -value if sweep.figure.better == "higher" else value

    return sorted(sweep.outcomes, key=place)


def columns(sweep: Sweep) -> list[Figure]:
    """List the figures of the table: the one that ranks the points, and the next two that are better in one
    direction."""
    ranking = [sweep.figure] if sweep.figure else []
    names = [figure.name for figure in ranking]
    figures = next((outcome.scored.figures for outcome in sweep.outcomes if not outcome.has_failed), [])
    others = [figure for figure in figures if figure.better != "neither" and figure.name not in names]
    return [*ranking, *others[:2]]


def show(sweep: Sweep, console: Console) -> None:
    """Print the table, the reasons of failures, and the verdict."""
    table = Table(title=tables.plain(f"Sweep of {sweep.recipe}"), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("point", no_wrap=True)
    for name in short(sweep.fields):
        table.add_column(tables.plain(name))
    figures = columns(sweep)
    headings = [figure.title for figure in figures]
    if any(outcome.difference for outcome in sweep.outcomes):
        headings.append("difference")
    headings.append("training")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for point in ranked(sweep):
        style = "bold" if point.name == sweep.best else ""
        if point.has_failed:
            style, cells = "red", ["failed"]
        else:
            cells = [_value(point, figure) for figure in figures]
            if "difference" in headings:
                cells.append(_difference(point, sweep))
            cells.append(report_page.duration(point.seconds))
        table.add_row(tables.plain(point.name), *map(tables.plain, point.shown), *cells, style=style)
    tables.show(table, console)
    for point in sweep.outcomes:
        if point.has_failed:
            console.print(
                printable(f"{point.name} failed: {_line(point.reason)}"),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    for line in (*sweep.warnings, verdict(sweep)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def log(sweep: Sweep) -> None:
    """Print the same on stderr, which is a pod's log."""
    show(sweep, Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH))


def html(sweep: Sweep) -> str:
    """Return the same with a plot, as one self-contained page."""
    lines = []
    for outcome in sweep.outcomes:
        figure = outcome.scored.figure(sweep.figure.name) if sweep.figure else None
        lines.append(Line(outcome.name, outcome.shown, figure.tuned.value if figure else None))
    orders = [_order(values) for values in zip(*(outcome.values for outcome in sweep.outcomes), strict=True)]
    higher = sweep.figure is not None and sweep.figure.better == "higher"
    title = f"held-out {sweep.figure.title}" if sweep.figure else "no figure"
    picture = parallel_coordinates.draw(short(sweep.fields), orders, lines, title, sweep.best, higher=higher)
    page = report_page.environment(escape=True).get_template("sweep.html.jinja")
    return page.render(
        sweep=sweep,
        ranked=ranked(sweep),
        columns=columns(sweep),
        said=verdict(sweep),
        picture=picture,
        line=_line,
        short=short,
    )


def short(fields: Sequence[str]) -> list[str]:
    """Return the last parts of the fields, or the complete field if its last part is not unique."""
    last = [field.rpartition(".")[2] for field in fields]
    return [name if last.count(name) == 1 else field for name, field in zip(last, fields, strict=True)]


def write(sweep: Sweep, points: Points, folder: Path) -> None:
    """Write sweep.json, report.html, best.yaml (a recipe for `pyflyte run`), and the list of these, into a
    new folder."""
    folder.mkdir(parents=True)
    sweep.write(folder / SWEEP)
    (folder / REPORT).write_text(html(sweep), encoding="utf-8")
    for recipe in points.runnable:
        if recipe.name == sweep.best:
            (folder / BEST).write_text(recipe.to_yaml(), encoding="utf-8")
    seal(folder, "sweep")


def _order(values: Sequence[Any]) -> list[str]:
    """Return the distinct displayed values: numbers by size, others in their order."""
    if all(isinstance(value, int | float) for value in values):
        values = sorted(values)
    return list(dict.fromkeys(map(shown, values)))


def _value(point: Outcome, column: Figure) -> str:
    figure = point.scored.figure(column.name)
    return "" if figure is None else report_page.value(figure, figure.tuned.value)


def _difference(point: Outcome, sweep: Sweep) -> str:
    """Return a point's difference from the best one; empty if it has none."""
    if point.difference is None or sweep.figure is None:
        return ""
    return report_page.apart(sweep.figure, point.difference)


def _line(reason: str) -> str:
    """Return the lines of an error as one, with a semicolon behind those that end without a stop."""
    *lines, last = [" ".join(line.split()) for line in reason.splitlines() if line.strip()] or [""]
    return " ".join([*(line if line.endswith((".", ";", ":", ",")) else f"{line};" for line in lines), last])
