"""The field's benchmarks, in parts: each on a pod of its own, on the shape that the recipe names or the plan's.

EVALUATE_TASKS maps shapes to tasks that are mapped over the jobs; without jobs no pod is asked for.
"""

from pathlib import Path
from typing import Any, NamedTuple

from flytekit import Resources, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune import harness
from flytune.failures import RETRIES
from flytune.harness import Job, JobResult
from flytune.metrics import Metrics
from flytune.recipe import Recipe
from flytune.shapes import load_shapes
from images import LIGHT
from images import TRAIN as IMAGE
from tasks.folders import fetch, fresh, unpack
from tasks.pods import declare


class Scored(NamedTuple):
    """Metrics with the tasks' scores, and the harness's own results of both models."""

    metrics: Metrics
    results: FlyteDirectory


@task(container_image=LIGHT, requests=Resources(cpu="1", mem="4Gi"))
def list_jobs(recipe: Recipe) -> list[Job]:
    """The parts of the recipe's tasks; what the harness does not know is refused here, before anything is trained."""
    return harness.jobs(recipe)


def evaluate_tasks(job: Job, recipe: Recipe, trained: FlyteDirectory, base: FlyteDirectory) -> FlyteFile:
    """What base and tuned model answer to one part of a task."""
    unpack(base)
    path = fresh("answers.json")
    harness.run(recipe, fetch(trained), job).write(path)
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


@task(container_image=LIGHT, requests=Resources(cpu="2", mem="8Gi"))
def combine_tasks(recipe: Recipe, metrics: Metrics, answers: list[FlyteFile]) -> Scored:
    """The harness's own figures over all parts."""
    out = fresh("harness")
    scores = harness.combine(recipe, [JobResult.read(Path(answer.download())) for answer in answers], out)
    return Scored(metrics.model_copy(update={"tasks": scores}), FlyteDirectory(str(out)))
