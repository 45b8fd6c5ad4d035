"""Fine-tuning from a recipe to a stored artifact.

pyflyte run workflows/finetune.py finetune --recipe recipes/demo-qlora.yaml
"""

from typing import Any

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from flytune.recipe import Recipe
from tasks.base_model import fetch_base_model
from tasks.evaluate import EVALUATE
from tasks.harness import EVALUATE_TASKS
from tasks.plan import make_plan
from tasks.prepare import prepare_data
from tasks.reference import REFERENCE
from tasks.report import report_failure
from tasks.store import store_artifact
from tasks.train import TRAIN
from workflows.routing import map_on, route_to


@workflow(on_failure=report_failure)
def finetune(recipe: Recipe) -> FlyteDirectory:
    """Plan, prepare the data, train on the plan's machines, evaluate the export, store one artifact."""
    planned, dataset, base = prepare(recipe)
    artifact: FlyteDirectory = train_and_store(recipe, planned, dataset, base)
    return artifact


def prepare(recipe: Any) -> tuple[Any, Any, Any]:
    """Return the plan, the prepared data, and the base model's files."""
    planned = make_plan(recipe=recipe)
    base = fetch_base_model(base=planned.base)
    return planned, prepare_data(request=planned.request, scratch_folder=planned.scratch_folder), base


def train_and_store(recipe: Any, planned: Any, dataset: Any, base: Any, export_only: bool = False) -> Any:
    """Train, or with `export_only` only export the newest checkpoint; evaluate the export; store one artifact."""
    over = {"request": planned.references}
    references = map_on("reference", planned.reference_shape, REFERENCE, over, dataset=dataset, base=base)
    inputs = {"recipe": recipe, "plan": planned.plan, "dataset": dataset}
    how = {"base": base, "export_only": export_only, "references": references}
    trained = route_to("train", planned.route, TRAIN, **how, **inputs)
    metrics, answers = evaluate(recipe, planned, dataset, base, trained)
    return store_artifact(trained=trained, metrics=metrics, answers=answers, harness_data=planned.harness_data, **inputs)


def evaluate(recipe: Any, planned: Any, dataset: Any, base: Any, trained: Any) -> tuple[Any, Any]:
    """Return metrics on held-out text and answers to the harness's tasks, of the base model and the exported model."""
    inputs = {"recipe": recipe, "trained": trained, "base": base}
    metrics = route_to("evaluate", planned.shape, EVALUATE, dataset=dataset, **inputs)
    over = {"job": planned.jobs}
    return metrics, map_on("tasks", planned.shape, EVALUATE_TASKS, over, harness_data=planned.harness_data, **inputs)
