"""Evaluation tasks in parts, their data for pods without access to a hub, and the scores of all parts."""

import json
from pathlib import Path

from flytune.evaluation import tasks
from flytune.evaluation.task_kind import Job, JobResult
from flytune.models import clean_process
from flytune.recipe import Recipe
from flytune.records import Metrics
from flytune.stages import base_model
from flytune.stages.orchestrator import File, Folder, Orchestrator
from flytune.stages.stored import local

_DATASETS = "datasets"


class HarnessData:
    """Data of the harness's tasks that this process has downloaded so far."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self.orchestrator, self._folder = orchestrator, orchestrator.new_folder()
        (self._folder / _DATASETS).mkdir()
        self._tasks: list[str] = []

    def jobs(self, recipe: Recipe) -> list[Job]:
        """Download the data of the recipe's tasks; return the parts of these tasks.

        Raises:
            RecipeError, DataError: the harness does not know a task, or cannot load its data.
        """
        jobs = tasks.jobs(recipe)
        tasks.download(recipe, None if self.orchestrator.is_local() else self._folder / _DATASETS)
        self._tasks += [job.task.name for job in jobs]
        return jobs

    def complete(self) -> Path:
        """Return the folder of all downloaded data."""
        (self._folder / "tasks.json").write_text(json.dumps(self._tasks), encoding="utf-8")
        return self._folder


def evaluate_tasks(
    orchestrator: Orchestrator, job: Job, recipe: Recipe, trained: Folder, base: Folder, harness_data: Folder
) -> File:
    """Store the answers of base and tuned model to one part of a task."""
    path = orchestrator.new_folder() / "answers.json"
    base_model.unpack(orchestrator, base)
    result = clean_process.run(
        tasks.run, recipe, local(orchestrator, trained), job, _datasets(orchestrator, harness_data)
    )
    result.write(path)
    return File.here(path)


def combine_tasks(
    orchestrator: Orchestrator, recipe: Recipe, metrics: Metrics, answers: list[File], harness_data: Folder
) -> Metrics:
    """Return metrics with the scores of the harness's tasks, for workflows that store no artifact."""
    return combine_scores(orchestrator, recipe, metrics, answers, harness_data)[0]


def combine_scores(
    orchestrator: Orchestrator, recipe: Recipe, metrics: Metrics, answers: list[File], harness_data: Folder
) -> tuple[Metrics, Path | None]:
    """Return metrics with the harness's scores over all parts, and the folder of its results; None without
    harness tasks."""
    if not recipe.evaluation.tasks:
        return metrics, None
    out = orchestrator.new_folder() / "harness"
    results = [JobResult.read(local(orchestrator, answer)) for answer in answers]
    scores = tasks.combine(recipe, results, out, _datasets(orchestrator, harness_data))
    return metrics.model_copy(update={"tasks": scores}), out


def _datasets(orchestrator: Orchestrator, harness_data: Folder) -> Path | None:
    """Return the local folder of the stored data; None on this machine, whose own cache has the data."""
    return None if orchestrator.is_local() else local(orchestrator, harness_data) / _DATASETS
