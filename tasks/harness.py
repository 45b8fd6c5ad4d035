"""The field's benchmarks, in parts: each on a pod of its own, on the shape that the recipe names or the plan's.

EVALUATE_TASKS maps shapes to tasks that are mapped over the jobs; without jobs no pod is asked for.
"""

from typing import Any

from flytekit import Resources, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.evaluation import score
from flytune.evaluation.harness import run
from flytune.evaluation.harness.run import Job
from flytune.failures.table import RETRIES
from flytune.hardware.shapes import load_shapes
from flytune.recipe.recipe import Recipe
from flytune.records.metrics import Metrics
from images import LIGHT
from images import TRAIN as IMAGE
from tasks.runtime.directories import fetch, fresh, unpack
from tasks.runtime.harness_data import combined, kept
from tasks.runtime.pods import declare
from tasks.runtime.retries import noted, retried
from tasks.runtime.schema import trimmed
from tasks.runtime.secrets import secrets


def evaluate_tasks(job: Job, recipe: Recipe, trained: FlyteDirectory, base: FlyteDirectory, data: FlyteDirectory) -> FlyteFile:
    """What base and tuned model answer to one part of a task."""
    path = fresh("answers.json")
    with retried(), noted("evaluate"):
        unpack(base)
        score.in_subprocess(run.run, recipe, fetch(trained), job, kept(data)).write(path)
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
def combine_tasks(recipe: Recipe, metrics: Metrics, answers: list[FlyteFile], data: FlyteDirectory) -> Metrics:
    """Return metrics with the tasks' scores, where no artifact is stored."""
    with retried():
        return combined(recipe, metrics, answers, data)[0]
