"""A sweep's own tasks, on CPUs: draw its points, keep what failed ones died of, compare the others."""

import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import Deck, FlyteContextManager, Resources, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error.error import FlyteError

from flytune import grids, sweeps
from flytune.grids import Points
from flytune.metrics import Metrics
from flytune.plans import Plan
from flytune.recipe import Recipe
from flytune.records import TrainingResult
from flytune.sweeps import Outcome
from images import LIGHT
from tasks.folders import fresh
from tasks.interfaces import trimmed
from tasks.secrets import secrets

_PODS = Resources(cpu="1", mem="2Gi")


class Drawn(NamedTuple):
    """`runnable`: the recipes of points that can run, `successes` of which must; below `notes` failed ones tell why."""

    points: Points
    runnable: list[Recipe]
    successes: int
    notes: str


@trimmed
@task(container_image=LIGHT, requests=_PODS, secret_requests=secrets("hub"))
def draw_points(
    recipe: Recipe,
    grid: dict,  # type: ignore[type-arg]  # Flyte's word for any JSON object
    changes: list[dict],  # type: ignore[type-arg]
    concurrency: int,
    min_success_ratio: float,
    max_points: int,
) -> Drawn:
    """Reads and plans every point before any is run."""
    sweeps.check(concurrency, min_success_ratio)
    points = sweeps.planned(grids.draw(recipe, grid, changes, max_points), min_success_ratio)
    notes = FlyteContextManager.current_context().file_access.get_random_remote_directory()
    return Drawn(points, points.runnable, sweeps.least(points, min_success_ratio), notes)


@trimmed
@task(container_image=LIGHT, requests=_PODS)
def note_failure(recipe: Recipe, notes: str, err: FlyteError | None = None) -> None:
    """Keeps what a point has died of below `notes`, for the sweep's table."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reason.txt"
        file.write_text(err.message if err else "", encoding="utf-8")
        FlyteContextManager.current_context().file_access.put_data(str(file), f"{notes}/{recipe.name}.txt")


@trimmed
@task(container_image=LIGHT, requests=_PODS, enable_deck=True, deck_fields=())
def compare_points(points: Points, artifacts: list[FlyteDirectory | None], notes: str) -> FlyteDirectory:
    """sweep.json, report.html, and best.yaml: the recipe of the lowest held-out loss."""
    pairs = list(zip(points.runnable, artifacts, strict=True))
    succeeded = {recipe.name: _outcome(points, recipe, artifact) for recipe, artifact in pairs if artifact is not None}
    reasons = {recipe.name: _reason(f"{notes}/{recipe.name}.txt") for recipe, artifact in pairs if artifact is None}
    sweep, folder = sweeps.compare(points, succeeded, reasons), fresh(f"{points.recipe}-sweep")
    sweeps.write(sweep, points, folder)
    sweeps.log(sweep)
    Deck("Sweep", (folder / sweeps.REPORT).read_text(encoding="utf-8"))
    return FlyteDirectory(str(folder))


def _outcome(points: Points, recipe: Recipe, artifact: FlyteDirectory) -> Outcome:
    """Its records alone are read: the weights stay where they are."""
    address = str(artifact.remote_source or artifact.path)
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan.read(_copy(f"{address}/plan.json", folder))
        training = TrainingResult.read(_copy(f"{address}/training.json", folder))
        metrics = Metrics.read(_copy(f"{address}/metrics.json", folder))
    values: list[Any] = [grids.value_at(recipe, field) for field in points.fields]
    return sweeps.outcome(recipe, values, plan, training, metrics, address)


def _reason(address: str) -> str:
    """What a failed point has noted, without Flyte's frames around it; empty where it could not."""
    with tempfile.TemporaryDirectory() as folder:
        if not FlyteContextManager.current_context().file_access.exists(address):
            return ""
        text = _copy(address, folder).read_text(encoding="utf-8")
    return re.sub(r"Error encountered while executing '[^']*':\s*", "", text).strip()


def _copy(address: str, folder: str) -> Path:
    target = Path(folder) / address.rpartition("/")[2]
    FlyteContextManager.current_context().file_access.get_data(address, str(target))
    return target
