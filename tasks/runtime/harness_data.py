"""Stored data of the harness's tasks for pods without access to a hub, and scores combined from the parts' answers."""

import json
from pathlib import Path

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.evaluation.harness import data as harness
from flytune.evaluation.harness import run
from flytune.evaluation.harness.run import Job, JobResult
from flytune.recipe import Recipe
from flytune.records import Metrics
from tasks.runtime.directories import fetch, is_local, new_folder

_DATASETS = "datasets"


class HarnessData:
    """Data of the harness's tasks that this pod has downloaded so far."""

    def __init__(self) -> None:
        self._folder = new_folder()
        (self._folder / _DATASETS).mkdir()
        self._tasks: list[str] = []

    def jobs(self, recipe: Recipe) -> list[Job]:
        """Download the data of the recipe's tasks; return the parts of these tasks.

        Raises:
            RecipeError, DataError: the harness does not know a task, or cannot load its data.
        """
        jobs = run.jobs(recipe)
        harness.download(recipe, None if is_local() else self._folder / _DATASETS)
        self._tasks += [job.task.name for job in jobs]
        return jobs

    def stored(self) -> FlyteDirectory:
        """Return the folder of all downloaded data."""
        (self._folder / "tasks.json").write_text(json.dumps(self._tasks), encoding="utf-8")
        return FlyteDirectory(str(self._folder))


def local_data(harness_data: FlyteDirectory) -> Path | None:
    """Return the local folder of the stored data; None on this machine, whose own cache has the data."""
    return None if is_local() else fetch(harness_data) / _DATASETS


def combine_scores(
    recipe: Recipe, metrics: Metrics, answers: list[FlyteFile], harness_data: FlyteDirectory
) -> tuple[Metrics, Path | None]:
    """Return metrics with the harness's scores over all parts, and the folder of its results; None without harness tasks."""
    if not recipe.evaluation.tasks:
        return metrics, None
    out = new_folder() / "harness"
    found = [JobResult.read(Path(answer.download())) for answer in answers]
    scores = run.combine(recipe, found, out, local_data(harness_data))
    return metrics.model_copy(update={"tasks": scores}), out
