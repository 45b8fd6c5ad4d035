"""Champion and challenger, compared on one node of the shape that evaluates; promotion and rollback on a CPU.

COMPARE maps shapes to tasks.
"""

from typing import Any

from flytekit import Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune.evaluation import guards
from flytune.failures.table import RETRIES
from flytune.hardware import load_shapes
from flytune.recipe import Recipe
from flytune.records import Metrics
from flytune.registry import ModelComparison, compare, history, refresh
from images import LIGHT
from images import TRAIN as IMAGE
from tasks.runtime.directories import fetch, fetch_file, unpack_base_model
from tasks.runtime.pods import declare
from tasks.runtime.retries import classify_failures
from tasks.runtime.schema import without_schema
from tasks.runtime.volumes import light_pod

_POD = Resources(cpu="1", mem="2Gi")


def compare_models(
    recipe: Recipe, artifact: FlyteDirectory, dataset: FlyteDirectory, base: FlyteDirectory, champion: str
) -> ModelComparison:
    """Compare challenger and champion on the same held-out tokens; without a champion, compare with the base model."""
    with classify_failures():
        if not champion:
            return compare.compare_with_base(Metrics.read(fetch_file(artifact, "metrics.json")))
        unpack_base_model(base)
        return compare.compare_artifacts(recipe, fetch(artifact), fetch(dataset), champion)


COMPARE: dict[str, Any] = {
    shape.name: declare(
        compare_models,
        f"compare_models_{shape.identifier}",
        shape.one_node,
        globals(),
        container_image=IMAGE,
        retries=RETRIES,
    )
    for shape in load_shapes()
}


@without_schema
@task(container_image=LIGHT, pod_template=light_pod(), requests=_POD, retries=RETRIES)
def promote_challenger(
    recipe: Recipe,
    accepted: str,
    champion: str,
    fingerprint: str,
    challenger: Recipe,
    artifact: FlyteDirectory,
    comparison: ModelComparison,
) -> str:
    """Accept the challenger if it is significantly better, and record the decision with its figures in any case."""
    with classify_failures():
        metrics = Metrics.read(fetch_file(artifact, "metrics.json"))
        place = refresh.final_address(str(artifact.remote_source or artifact.path), challenger, metrics)
    broken = guards.broken(challenger, metrics)
    decision = refresh.record_decision(recipe, accepted, champion, fingerprint, place, comparison, broken)
    return f"{decision.outcome}: {decision.reason}"


@without_schema
@task(container_image=LIGHT, pod_template=light_pod(), requests=_POD)
def rollback_accepted(accepted: str, reason: str) -> str:
    """Accept the previously accepted model again; return its artifact's address."""
    return history.rollback(accepted, reason).artifact
