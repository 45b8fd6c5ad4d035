"""Benchmarks of lm-evaluation-harness in parts, one pod each, on the shape of the recipe or of the plan.

EVALUATE_TASKS maps shapes to tasks that are mapped over the jobs; without jobs no pod is requested.
"""

from typing import Any

from flytekit import Resources, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.evaluation.harness import run
from flytune.evaluation.harness.run import Job
from flytune.failures.table import RETRIES
from flytune.hardware import load_shapes
from flytune.models import clean_process
from flytune.recipe import Recipe
from flytune.records import Metrics
from images import LIGHT
from images import TRAIN as IMAGE
from tasks.runtime.directories import fetch, new_folder, unpack_base_model
from tasks.runtime.harness_data import combine_scores, local_data
from tasks.runtime.pods import declare
from tasks.runtime.retries import classify_failures, record_phase
from tasks.runtime.schema import without_schema
from tasks.runtime.secrets import secrets
from tasks.runtime.volumes import light_pod


def evaluate_tasks(
    job: Job, recipe: Recipe, trained: FlyteDirectory, base: FlyteDirectory, harness_data: FlyteDirectory
) -> FlyteFile:
    """Store the answers of base and tuned model to one part of a task."""
    path = new_folder() / "answers.json"
    with classify_failures(), record_phase("evaluate"):
        unpack_base_model(base)
        clean_process.run(run.run, recipe, fetch(trained), job, local_data(harness_data)).write(path)
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


@without_schema
@task(
    container_image=LIGHT,
    pod_template=light_pod(),
    requests=Resources(cpu="2", mem="8Gi"),
    retries=RETRIES,
    secret_requests=secrets("hub"),
)
def combine_tasks(recipe: Recipe, metrics: Metrics, answers: list[FlyteFile], harness_data: FlyteDirectory) -> Metrics:
    """Return metrics with the scores of the harness's tasks, for workflows that store no artifact."""
    with classify_failures():
        return combine_scores(recipe, metrics, answers, harness_data)[0]
