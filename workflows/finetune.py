"""From a recipe to a stored artifact.

pyflyte run workflows/finetune.py finetune --recipe recipes/demo-qlora.yaml
"""

from typing import Any

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from flytune.recipe import Recipe
from tasks.base_model import fetch_base_model
from tasks.evaluate import EVALUATE
from tasks.harness import EVALUATE_TASKS, combine_tasks, list_jobs
from tasks.plan import make_plan
from tasks.prepare import prepare_data
from tasks.report import report_failure
from tasks.store import store_artifact
from tasks.train import TRAIN
from workflows.routing import each_on, on


@workflow(on_failure=report_failure)
def finetune(recipe: Recipe) -> FlyteDirectory:
    """Plan, prepare the data, train on the plan's machines, evaluate the export, store one artifact."""
    planned = make_plan(recipe=recipe)
    base = fetch_base_model(base=planned.base)
    dataset = prepare_data(request=planned.request, keep=planned.keep)
    artifact: FlyteDirectory = stored(recipe, planned, dataset, base)
    return artifact


def stored(recipe: Any, planned: Any, dataset: Any, base: Any, further: bool = True) -> Any:
    """Trains, or exports what there is where not `further`; evaluates the export; stores one artifact."""
    # Training takes its recipe: a task that the harness does not know is refused before.
    asked = list_jobs(recipe=recipe)
    given = {"recipe": asked.recipe, "plan": planned.plan, "dataset": dataset}
    trained = on("train", planned.route, TRAIN, base=base, further=further, **given)
    scored = evaluated(recipe, planned, dataset, base, trained, asked)
    return store_artifact(trained=trained, metrics=scored.metrics, harness=scored.results, **given)


def evaluated(recipe: Any, planned: Any, dataset: Any, base: Any, trained: Any, asked: Any) -> Any:
    """Held-out text and, beside it, the harness's tasks: base and tuned model, from the exported files."""
    inputs = {"recipe": recipe, "trained": trained, "base": base}
    metrics = on("evaluate", planned.shape, EVALUATE, dataset=dataset, **inputs)
    over = {"job": asked.jobs}
    answers = each_on("tasks", planned.shape, EVALUATE_TASKS, over, data=asked.data, **inputs)
    return combine_tasks(recipe=recipe, metrics=metrics, answers=answers, data=asked.data)
