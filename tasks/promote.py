"""Champion and challenger: held against each other on one node of the shape that evaluates; then the pointer, on a CPU.

COMPARE maps shapes to tasks.
"""

from typing import Any

from flytekit import Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune.evaluation import guards
from flytune.failures.table import RETRIES
from flytune.hardware.shapes import load_shapes
from flytune.recipe.recipe import Recipe
from flytune.records.metrics import Metrics
from flytune.registry import compare, history, refresh
from flytune.registry.history import ModelComparison
from images import LIGHT
from images import TRAIN as IMAGE
from tasks.runtime.directories import fetch, fetch_file, unpack
from tasks.runtime.pods import declare
from tasks.runtime.retries import retried
from tasks.runtime.schema import trimmed

_POD = Resources(cpu="1", mem="2Gi")


def compare_models(
    recipe: Recipe, artifact: FlyteDirectory, dataset: FlyteDirectory, base: FlyteDirectory, champion: str
) -> ModelComparison:
    """Challenger and champion on the same held-out tokens; against its base model where there is no champion."""
    with retried():
        if not champion:
            return compare.compare_with_base(Metrics.read(fetch_file(artifact, "metrics.json")))
        unpack(base)
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


@trimmed
@task(container_image=LIGHT, requests=_POD, retries=RETRIES)
def promote_challenger(
    recipe: Recipe,
    accepted: str,
    champion: str,
    fingerprint: str,
    changed: Recipe,
    artifact: FlyteDirectory,
    duel: ModelComparison,
) -> str:
    """Accepts the challenger where it is better beyond doubt, and records the decision with its figures in any case."""
    with retried():
        metrics = Metrics.read(fetch_file(artifact, "metrics.json"))
        address = refresh.final_address(str(artifact.remote_source or artifact.path), changed, metrics)
    broken = guards.broken(changed, metrics)
    decision = refresh.record_decision(recipe, accepted, champion, fingerprint, address, duel, broken)
    return f"{decision.outcome}: {decision.reason}"


@trimmed
@task(container_image=LIGHT, requests=_POD)
def rollback_accepted(accepted: str, reason: str) -> str:
    """Accepts the model before the accepted one again."""
    return history.rollback(accepted, reason).artifact
