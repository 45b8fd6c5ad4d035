"""Evaluation of the exported files: one Flyte task for each row of shapes.yaml, on one of its nodes."""

from typing import Any

from flytekit.types.directory import FlyteDirectory

from flytune.evaluation import score
from flytune.failures.table import RETRIES
from flytune.hardware import load_shapes
from flytune.recipe import Recipe
from flytune.records import Metrics
from images import TRAIN as IMAGE
from tasks.runtime.directories import fetch, unpack_base_model
from tasks.runtime.pods import declare
from tasks.runtime.retries import classify_failures, record_phase


def evaluate_model(
    recipe: Recipe, trained: FlyteDirectory, dataset: FlyteDirectory, base: FlyteDirectory | None = None
) -> Metrics:
    """Score base and tuned model on the same held-out tokens, and compare their sample answers."""
    with classify_failures(), record_phase("evaluate"):
        unpack_base_model(base)
        return score.score_in_subprocess(recipe, fetch(trained), fetch(dataset))


EVALUATE: dict[str, Any] = {
    shape.name: declare(
        evaluate_model,
        f"evaluate_model_{shape.identifier}",
        shape.one_node,
        globals(),
        container_image=IMAGE,
        retries=RETRIES,
    )
    for shape in load_shapes()
}
