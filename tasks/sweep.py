"""Tasks of a sweep, on CPUs: draw and plan its points; compare those that succeeded."""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import Deck, FlyteContextManager, Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune.artifacts import notify
from flytune.errors import FlytuneError, RecipeError
from flytune.failures import reports
from flytune.failures.table import RETRIES
from flytune.recipe import Recipe
from flytune.records import Metrics, TrainingResult
from flytune.sweeps import Outcome, Points, Run, Running
from flytune.sweeps import grid as sweeps_grid
from flytune.sweeps import results as sweeps_results
from flytune.training import reference
from images import LIGHT
from tasks.plan import PLAN_IMAGE, plan_run
from tasks.runtime.directories import new_folder
from tasks.runtime.harness_data import HarnessData
from tasks.runtime.retries import classify_failures
from tasks.runtime.schema import without_schema
from tasks.runtime.secrets import secrets
from tasks.runtime.sweep_stages import result_of
from tasks.runtime.volumes import light_pod

ALL = "all"
"""Name of the one group that stores all points."""


class DrawOutput(NamedTuple):
    """All points, the runs of those that can run, and the data of their evaluation tasks."""

    points: Points
    running: Running
    harness_data: FlyteDirectory


@without_schema
@task(
    container_image=PLAN_IMAGE,
    pod_template=light_pod(),
    # Memory for the harness, which loads its tasks' data.
    requests=Resources(cpu="2", mem="8Gi"),
    retries=RETRIES,
    secret_requests=secrets("hub"),
)
def draw_points(
    recipe: Recipe,
    grid: dict,  # type: ignore[type-arg]  # Flyte's type for any JSON object
    changes: list[dict],  # type: ignore[type-arg]
    concurrency: int,
    min_success_ratio: float,
    max_points: int,
) -> DrawOutput:
    """Read and plan every point before any is run."""
    sweeps_results.check(concurrency, min_success_ratio)
    harness, runs = HarnessData(), list[Run]()
    with classify_failures():
        drawn = sweeps_grid.draw(recipe, grid, changes, max_points)
        points = sweeps_results.plan_points(drawn, min_success_ratio, lambda one: runs.append(_plan_point(one, harness)))
    running = Running(
        runs=runs,
        least=sweeps_results.least(points, min_success_ratio),
        concurrency=concurrency,
        notes=FlyteContextManager.current_context().file_access.get_random_remote_directory(),
    )
    return DrawOutput(points, running, harness.stored())


def _plan_point(recipe: Recipe, harness: HarnessData) -> Run:
    """Plan one point's run. Recoverable errors are raised unchanged; any other error refuses this point only."""
    try:
        if reference.is_needed(recipe):
            raise RecipeError(
                f"recipe {recipe.name}: objective.precompute_ref_log_probs: a sweep does not compute the reference's "
                "log-probabilities before training; set it to false, with a method and sharding that can run the reference, "
                "or run finetune for each point"
            )
        return plan_run(recipe, harness)
    except FlytuneError:
        raise
    except Exception as error:
        if reports.of_error(error, rank=0).recoverable:
            raise
        raise RecipeError(f"{type(error).__name__}: {error}") from error


@without_schema
@task(
    container_image=LIGHT,
    pod_template=light_pod(),
    requests=Resources(cpu="1", mem="2Gi"),
    retries=RETRIES,
    secret_requests=secrets("notify"),
    enable_deck=True,
    deck_fields=(),
)
def compare_points(points: Points, running: Running, artifacts: list[FlyteDirectory | None]) -> FlyteDirectory:
    """Write sweep.json, report.html, and best.yaml: the recipe of the lowest held-out loss.

    Raises:
        FlytuneError: fewer points have succeeded than must; the deck and the log have the table.
    """
    pairs = enumerate(zip(running.runs, artifacts, strict=True))
    with classify_failures():
        made = {run.recipe.name: result_of(running, "store", ALL, at, one, "artifact") for at, (run, one) in pairs}
        running = running.after(made)
        succeeded = {run.recipe.name: _outcome(points, run) for run in running.runs}
    for point in points.points:
        if (name := point.recipe.name) in running.reasons:
            notify.send(point.recipe, "failed", f"{name}: failed in a sweep.\n{running.reasons[name]}")
    sweep, folder = sweeps_results.compare(points, succeeded, running.reasons), new_folder() / f"{points.recipe}-sweep"
    sweeps_results.write(sweep, points, folder)
    sweeps_results.log(sweep)
    Deck("Sweep", (folder / sweeps_results.REPORT).read_text(encoding="utf-8"))
    if len(succeeded) < running.least:
        Deck.publish()
        raise FlytuneError(sweeps_results.too_few(sweep, running.least))
    return FlyteDirectory(str(folder))


def _outcome(points: Points, run: Run) -> Outcome:
    """Return the outcome of one point that succeeded, from its records; no weights are downloaded."""
    files = FlyteContextManager.current_context().file_access
    with tempfile.TemporaryDirectory() as folder:
        for name in ("training.json", "metrics.json"):
            files.get_data(f"{run.artifact}/{name}", f"{folder}/{name}")
        training, metrics = TrainingResult.read(Path(folder, "training.json")), Metrics.read(Path(folder, "metrics.json"))
    values: list[Any] = [sweeps_grid.value_at(run.recipe, field) for field in points.fields]
    return sweeps_results.outcome(run.recipe, values, run.plan, training, metrics, run.artifact)
