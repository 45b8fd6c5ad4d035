"""The data of the harness's tasks as a folder that travels, for pods that see no hub; and the parts' answers put together."""

import json
from pathlib import Path

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.evaluation.harness import data as harness_data
from flytune.evaluation.harness import run
from flytune.evaluation.harness.run import Job, JobResult
from flytune.recipe.recipe import Recipe
from flytune.records.metrics import Metrics
from tasks.runtime.directories import fetch, fresh, is_local

_KEPT = "datasets"


class HarnessData:
    """Data that has been kept in this pod so far."""

    def __init__(self) -> None:
        self._folder = fresh("data")
        (self._folder / _KEPT).mkdir(parents=True)
        self._tasks: list[str] = []

    def jobs(self, recipe: Recipe) -> list[Job]:
        """Return the parts of the recipe's tasks, whose data is kept.

        Raises:
            RecipeError, DataError: what the harness does not know or cannot load.
        """
        jobs = run.jobs(recipe)
        harness_data.download(recipe, None if is_local() else self._folder / _KEPT)
        self._tasks += [job.task.name for job in jobs]
        return jobs

    def stored(self) -> FlyteDirectory:
        """Return the folder of all that was kept."""
        (self._folder / "tasks.json").write_text(json.dumps(self._tasks), encoding="utf-8")
        return FlyteDirectory(str(self._folder))


def kept(data: FlyteDirectory) -> Path | None:
    """Return the folder of what was stored; None on this machine, whose own cache has it."""
    return None if is_local() else fetch(data) / _KEPT


def combined(recipe: Recipe, metrics: Metrics, answers: list[FlyteFile], data: FlyteDirectory) -> tuple[Metrics, Path | None]:
    """Return the harness's own figures over all parts, and the folder of its results; None where nothing was asked."""
    if not recipe.evaluation.tasks:
        return metrics, None
    out = fresh("harness")
    found = [JobResult.read(Path(answer.download())) for answer in answers]
    scores = run.combine(recipe, found, out, kept(data))
    return metrics.model_copy(update={"tasks": scores}), out
