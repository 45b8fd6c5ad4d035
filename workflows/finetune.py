"""From a recipe to a stored artifact.

pyflyte run workflows/finetune.py finetune --recipe recipes/demo-qlora.yaml
"""

from typing import Any

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from flytune.recipe.recipe import Recipe
from tasks.base_model import fetch_base_model
from tasks.evaluate import EVALUATE
from tasks.harness import EVALUATE_TASKS
from tasks.plan import make_plan
from tasks.prepare import prepare_data
from tasks.report import report_failure
from tasks.store import store_artifact
from tasks.train import TRAIN
from workflows.routing import each_on, on


@workflow(on_failure=report_failure)
def finetune(recipe: Recipe) -> FlyteDirectory:
    """Plan, prepare the data, train on the plan's machines, evaluate the export, store one artifact."""
    planned, dataset, base = prepared(recipe)
    artifact: FlyteDirectory = stored(recipe, planned, dataset, base)
    return artifact


def prepared(recipe: Any) -> tuple[Any, Any, Any]:
    """Return the plan, the prepared data, and the base model's files."""
    planned = make_plan(recipe=recipe)
    base = fetch_base_model(base=planned.base)
    return planned, prepare_data(request=planned.request, keep=planned.keep), base


def stored(recipe: Any, planned: Any, dataset: Any, base: Any, export_only: bool = False) -> Any:
    """Train, or with `export_only` export the newest checkpoint; evaluate the export; store one artifact."""
    given = {"recipe": recipe, "plan": planned.plan, "dataset": dataset}
    trained = on("train", planned.route, TRAIN, base=base, export_only=export_only, **given)
    metrics, answers = evaluated(recipe, planned, dataset, base, trained)
    return store_artifact(trained=trained, metrics=metrics, answers=answers, data=planned.data, **given)


def evaluated(recipe: Any, planned: Any, dataset: Any, base: Any, trained: Any) -> tuple[Any, Any]:
    """Get metrics on held-out text, and answers to the harness's tasks: base and tuned model, from the exported files."""
    inputs = {"recipe": recipe, "trained": trained, "base": base}
    metrics = on("evaluate", planned.shape, EVALUATE, dataset=dataset, **inputs)
    over = {"job": planned.jobs}
    return metrics, each_on("tasks", planned.shape, EVALUATE_TASKS, over, data=planned.data, **inputs)
