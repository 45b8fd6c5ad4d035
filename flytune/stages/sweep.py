"""Beginning and end of a sweep, on CPUs: its points are drawn and planned; those that succeeded are
compared."""

from typing import Any, NamedTuple

from flytune.artifacts import kept, notify
from flytune.console import run_lines, step_lines
from flytune.errors import FlytuneError, RecipeError
from flytune.failures import reports
from flytune.files import sha256_of
from flytune.recipe import Recipe
from flytune.records import Metrics, TrainingResult
from flytune.records.contents import CONTENTS
from flytune.sentences import counted
from flytune.stages import points as stage_points
from flytune.stages.harness import HarnessData
from flytune.stages.orchestrator import Folder, Orchestrator, Report
from flytune.stages.plan import plan_run
from flytune.stages.planned import Run, Running
from flytune.stages.stored import at_address, local_file, store
from flytune.stages.table import RUN
from flytune.sweeps import Outcome, Points, results
from flytune.sweeps import grid as sweeps_grid


class DrawOutput(NamedTuple):
    """All points, and the runs of those that can run."""

    points: Points
    running: Running


def draw_points(
    orchestrator: Orchestrator,
    recipe: Recipe,
    grid: dict,  # type: ignore[type-arg]  # the type of any JSON object in Flyte
    changes: list[dict],  # type: ignore[type-arg]
    concurrency: int,
    min_success_ratio: float,
    max_points: int,
) -> DrawOutput:
    """Read and plan every point before any is run."""
    results.check(concurrency, min_success_ratio)
    harness, runs = HarnessData(orchestrator), list[Run]()
    drawn = sweeps_grid.draw(recipe, grid, changes, max_points)
    points = results.plan_points(
        drawn,
        min_success_ratio,
        lambda recipe_of_point: runs.append(_plan_point(orchestrator, recipe_of_point, harness)),
    )
    values, data = (
        {point.recipe.name: point.values for point in points.points},
        store(orchestrator, harness.complete()),
    )
    values_of_all = {"harness_data": data.address, "export_only": False}
    running = Running(
        runs=[
            run.model_copy(update={"values": values[run.recipe.name], "made": values_of_all}) for run in runs
        ],
        least=results.least(points, min_success_ratio),
        concurrency=concurrency,
        notes=orchestrator.new_address(),
    )
    refused = [
        f"{point.recipe.name} ({point.values}) cannot run: {point.refused}"
        for point in points.points
        if point.refused
    ]
    titles = running.titles(running.runs)
    for line in [f"{recipe.name}: sweep of {counted(len(points.points), 'point')}", *titles, *refused]:
        step_lines.show(line)
    return DrawOutput(points, running)


def _plan_point(orchestrator: Orchestrator, recipe: Recipe, harness: HarnessData) -> Run:
    """Plan one point's run. Recoverable errors are raised unchanged; any other error refuses this point
    only."""
    try:
        return Run(**dict(plan_run(orchestrator, recipe, harness)))
    except FlytuneError:
        raise
    except Exception as error:
        if reports.of_error(error, rank=0).recoverable:
            raise
        raise RecipeError(f"{type(error).__name__}: {error}") from error


def compare_points(
    orchestrator: Orchestrator,
    report: Report,
    points: Points,
    running: Running,
    artifact: list[list[Folder | None]],
) -> Folder:
    """Write sweep.json, report.html, and best.yaml: the recipe of the point with the best figure.

    Raises:
        FlytuneError: fewer points have succeeded than must; the page and the log have the table.
    """
    running = stage_points.after(orchestrator, running, RUN[-1].stages, {"artifact": artifact})
    succeeded = {run.recipe.name: _outcome(orchestrator, points, run) for run in running.runs}
    for point in points.points:
        if (name := point.recipe.name) in running.reasons:
            notify.send(point.recipe, "failed", f"{name}: failed in a sweep.\n{running.reasons[name]}")
    sweep = results.compare(points, succeeded, running.reasons)
    folder = orchestrator.new_folder() / f"{points.recipe}-sweep"
    results.write(sweep, points, folder)
    results.log(sweep)
    report((folder / results.REPORT).read_text(encoding="utf-8"))
    if len(succeeded) < running.least:
        raise FlytuneError(results.too_few(sweep, running.least))
    if orchestrator.is_local():
        folder = kept.keep(folder, f"{folder.name}-{sha256_of(folder / CONTENTS)[:12]}")
    stored = store(orchestrator, folder)
    for line in run_lines.result_lines(f"{sweep.recipe}: sweep", stored.address, results.REPORT):
        step_lines.show(line)
    return stored


def _outcome(orchestrator: Orchestrator, points: Points, run: Run) -> Outcome:
    """Return the outcome of one point that succeeded, from its records; no weights are fetched."""
    artifact = at_address(orchestrator, run.made["artifact"])
    training = TrainingResult.read(local_file(orchestrator, artifact, "training.json"))
    metrics = Metrics.read(local_file(orchestrator, artifact, "metrics.json"))
    values: list[Any] = [sweeps_grid.value_at(run.recipe, field) for field in points.fields]
    return results.outcome(run.recipe, values, run.plan, training, metrics, artifact.address)
