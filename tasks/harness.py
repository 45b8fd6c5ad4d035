"""The field's benchmarks, in parts: each on a pod of its own, on the shape that the recipe names or the plan's.

EVALUATE_TASKS maps shapes to tasks that are mapped over the jobs; without jobs no pod is asked for.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import Resources, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune import evaluation, harness, harness_data
from flytune.failures import RETRIES
from flytune.harness import Job, JobResult
from flytune.metrics import Metrics
from flytune.recipe import Recipe
from flytune.shapes import load_shapes
from images import LIGHT
from images import TRAIN as IMAGE
from tasks.folders import fetch, fresh, is_local, unpack
from tasks.interfaces import trimmed
from tasks.pods import declare
from tasks.retrying import retried
from tasks.secrets import secrets

_KEPT = "datasets"


class Asked(NamedTuple):
    """The parts, and the data of the tasks, for pods that see no hub. Who takes `recipe` waits for the check."""

    jobs: list[Job]
    data: FlyteDirectory
    recipe: Recipe


class Scored(NamedTuple):
    """Metrics with the tasks' scores, and the harness's own results of both models."""

    metrics: Metrics
    results: FlyteDirectory


@trimmed
@task(container_image=LIGHT, requests=Resources(cpu="2", mem="8Gi"), retries=RETRIES, secret_requests=secrets("hub"))
def list_jobs(recipe: Recipe) -> Asked:
    """The parts of the recipe's tasks; what the harness does not know or cannot load is refused before anything is trained."""
    folder = fresh("data")
    (folder / _KEPT).mkdir(parents=True)
    with retried():
        jobs = harness.jobs(recipe)
        harness_data.keep(recipe, None if is_local() else folder / _KEPT)
    (folder / "tasks.json").write_text(json.dumps([job.task.name for job in jobs]), encoding="utf-8")
    return Asked(jobs, FlyteDirectory(str(folder)), recipe)


def _kept(data: FlyteDirectory) -> Path | None:
    """Where list_jobs has kept data; None on this machine, whose own cache has it."""
    return None if is_local() else fetch(data) / _KEPT


def evaluate_tasks(job: Job, recipe: Recipe, trained: FlyteDirectory, base: FlyteDirectory, data: FlyteDirectory) -> FlyteFile:
    """What base and tuned model answer to one part of a task."""
    path = fresh("answers.json")
    with retried():
        unpack(base)
        evaluation.afresh(harness.run, recipe, fetch(trained), job, _kept(data)).write(path)
    return FlyteFile(str(path))


EVALUATE_TASKS: dict[str, Any] = {
    shape.name: declare(
        evaluate_tasks,
        f"evaluate_tasks_{shape.identifier}",
        shape.one_node,
        globals(),
        container_image=IMAGE,
        retries=RETRIES,
    )
    for shape in load_shapes()
}


@trimmed
@task(container_image=LIGHT, requests=Resources(cpu="2", mem="8Gi"), retries=RETRIES, secret_requests=secrets("hub"))
def combine_tasks(recipe: Recipe, metrics: Metrics, answers: list[FlyteFile], data: FlyteDirectory) -> Scored:
    """The harness's own figures over all parts."""
    out = fresh("harness")
    with retried():
        found = [JobResult.read(Path(answer.download())) for answer in answers]
        scores = harness.combine(recipe, found, out, _kept(data))
    return Scored(metrics.model_copy(update={"tasks": scores}), FlyteDirectory(str(out)))
