"""A sweep's own tasks, on CPUs: draw its points and plan them; compare those that succeeded."""

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import Deck, FlyteContextManager, Resources, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.artifacts import notify
from flytune.errors import FlytuneError, RecipeError
from flytune.failures import reports
from flytune.failures.table import RETRIES
from flytune.recipe.recipe import Recipe
from flytune.records.metrics import Metrics
from flytune.records.training import TrainingResult
from flytune.sweeps import grid as sweeps_grid
from flytune.sweeps import results as sweeps_results
from flytune.sweeps.grid import Points
from flytune.sweeps.points import Run, Running, distinct
from flytune.sweeps.results import Outcome
from images import LIGHT
from tasks.plan import planned
from tasks.runtime.directories import fresh
from tasks.runtime.harness_data import HarnessData
from tasks.runtime.mapping import reason
from tasks.runtime.retries import retried
from tasks.runtime.schema import trimmed
from tasks.runtime.secrets import secrets

ALL = "all"
"""The group of all points, which are stored by one task."""


class Drawn(NamedTuple):
    """All points; those that can run; the data of their evaluation tasks."""

    points: Points
    running: Running
    data: FlyteDirectory


@trimmed
@task(
    container_image=LIGHT,
    # The harness loads its tasks' data.
    requests=Resources(cpu="2", mem="8Gi"),
    retries=RETRIES,
    secret_requests=secrets("hub"),
)
def draw_points(
    recipe: Recipe,
    grid: dict,  # type: ignore[type-arg]  # Flyte's word for any JSON object
    changes: list[dict],  # type: ignore[type-arg]
    concurrency: int,
    min_success_ratio: float,
    max_points: int,
) -> Drawn:
    """Reads and plans every point before any is run."""
    sweeps_results.check(concurrency, min_success_ratio)
    harness, runs = HarnessData(), list[Run]()
    with retried():
        drawn = sweeps_grid.draw(recipe, grid, changes, max_points)
        points = sweeps_results.plan_points(drawn, min_success_ratio, lambda one: runs.append(_planned(one, harness)))
    running = Running(
        runs=runs,
        least=sweeps_results.least(points, min_success_ratio),
        concurrency=concurrency,
        notes=FlyteContextManager.current_context().file_access.get_random_remote_directory(),
    )
    return Drawn(points, running, harness.stored())


def _planned(recipe: Recipe, harness: HarnessData) -> Run:
    """Plan one point's run. What another attempt may mend is raised as it is; all else is the point's own, and refuses it."""
    try:
        return planned(recipe, harness)
    except FlytuneError:
        raise
    except Exception as error:
        if reports.of_error(error, rank=0).recoverable:
            raise
        raise RecipeError(f"{type(error).__name__}: {error}") from error


@trimmed
@task(
    container_image=LIGHT,
    requests=Resources(cpu="1", mem="2Gi"),
    retries=RETRIES,
    secret_requests=secrets("notify"),
    enable_deck=True,
    deck_fields=(),
)
def compare_points(points: Points, running: Running, artifacts: list[FlyteDirectory | None]) -> FlyteDirectory:
    """Write sweep.json, report.html, and best.yaml: the recipe of the lowest held-out loss.

    Raises:
        FlytuneError: fewer have succeeded than must; the deck and the log have the table.
    """
    pairs = enumerate(zip(running.runs, artifacts, strict=True))
    with retried():
        made = {run.recipe.name: _made(running, "store", ALL, at, one, "artifact") for at, (run, one) in pairs}
        running = running.after(made)
        succeeded = {run.recipe.name: _outcome(points, run) for run in running.runs}
    for point in points.points:
        if (name := point.recipe.name) in running.reasons:
            notify.send(point.recipe, "failed", f"{name}: failed in a sweep.\n{running.reasons[name]}")
    sweep, folder = sweeps_results.compare(points, succeeded, running.reasons), fresh(f"{points.recipe}-sweep")
    sweeps_results.write(sweep, points, folder)
    sweeps_results.log(sweep)
    Deck("Sweep", (folder / sweeps_results.REPORT).read_text(encoding="utf-8"))
    if len(succeeded) < running.least:
        Deck.publish()
        raise FlytuneError(sweeps_results.too_few(sweep, running.least))
    return FlyteDirectory(str(folder))


def notes(running: Running, stage: str, group: str) -> str:
    """Return the address of what the elements of one map task have failed of."""
    return f"{running.notes}/{stage}/{group}"


def with_data(running: Running, datasets: list[FlyteDirectory | None], bases: list[FlyteDirectory | None]) -> Running:
    """Return the runs whose data and base model are there: one of each for all runs that share them."""
    requests, models = distinct([run.request for run in running.runs]), distinct([run.base for run in running.runs])
    results: dict[str, dict[str, str] | str] = {}
    for run in running.runs:
        data, model = requests.index(run.request), models.index(run.base)
        found = _made(running, "prepare", "data", data, datasets[data], "dataset")
        files = _made(running, "prepare", "base", model, bases[model], "base_files")
        results[run.recipe.name] = found if isinstance(found, str) else files if isinstance(files, str) else found | files
    return running.after(results)


def with_models(running: Running, trained: list[list[FlyteDirectory | None]]) -> Running:
    """Return the runs that were trained; `trained` has a list for each route."""
    results = {}
    for (route, runs), models in zip(running.by_route().items(), trained, strict=True):
        for index, (run, model) in enumerate(zip(runs, models, strict=True)):
            results[run.recipe.name] = _made(running, "train", route, index, model, "trained")
    return running.after(results)


def with_metrics(running: Running, metrics: list[list[Metrics | None]], answers: list[list[FlyteFile | None]]) -> Running:
    """Return the runs that were evaluated in all parts; both have a list for each shape, answers for those that are asked."""
    results: dict[str, dict[str, Any] | str] = {}
    parts = iter(answers)
    for (shape, runs), found in zip(running.by_shape().items(), metrics, strict=True):
        files = enumerate(next(parts) if any(run.jobs for run in runs) else [])
        for index, (run, one) in enumerate(zip(runs, found, strict=True)):
            mine = list(islice(files, len(run.jobs)))
            unanswered = [part for part, file in mine if file is None]
            if one is None:
                results[run.recipe.name] = _reason(running, "evaluate", shape, index)
            elif unanswered:
                results[run.recipe.name] = _reason(running, "ask", shape, unanswered[0])
            else:
                addresses = [str(file.remote_source or file.path) for _, file in mine if file]
                results[run.recipe.name] = {"metrics": one, "answers": addresses}
    return running.after(results)


def _made(
    running: Running, stage: str, group: str, index: int, folder: FlyteDirectory | None, field: str
) -> dict[str, str] | str:
    """Return the field with the folder's address; or the reason why there is none."""
    if folder is None:
        return _reason(running, stage, group, index)
    return {field: str(folder.remote_source or folder.path)}


def _reason(running: Running, stage: str, group: str, index: int) -> str:
    return (
        f"{stage}: {reason(notes(running, stage, group), index) or 'its pod was ended before it could tell; see the console'}"
    )


def _outcome(points: Points, run: Run) -> Outcome:
    """Return the outcome of one point that succeeded. Its records alone are read: the weights stay where they are."""
    files = FlyteContextManager.current_context().file_access
    with tempfile.TemporaryDirectory() as folder:
        for name in ("training.json", "metrics.json"):
            files.get_data(f"{run.artifact}/{name}", f"{folder}/{name}")
        training, metrics = TrainingResult.read(Path(folder, "training.json")), Metrics.read(Path(folder, "metrics.json"))
    values: list[Any] = [sweeps_grid.value_at(run.recipe, field) for field in points.fields]
    return sweeps_results.outcome(run.recipe, values, run.plan, training, metrics, run.artifact)
