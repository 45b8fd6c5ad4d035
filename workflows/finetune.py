"""From a recipe to a stored artifact.

pyflyte run workflows/finetune.py finetune --recipe recipes/demo-qlora.yaml
"""

from typing import Any

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from flytune.recipe import Recipe
from tasks.base_model import fetch_base_model
from tasks.evaluate import EVALUATE
from tasks.plan import make_plan
from tasks.prepare import prepare_data
from tasks.report import report_failure
from tasks.store import store_artifact
from tasks.train import TRAIN
from workflows.routing import on


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
    inputs = {"recipe": recipe, "plan": planned.plan, "dataset": dataset, "base": base, "further": further}
    trained = on("train", planned.route, TRAIN, **inputs)
    metrics = on("evaluate", planned.shape, EVALUATE, recipe=recipe, trained=trained, dataset=dataset, base=base)
    return store_artifact(recipe=recipe, plan=planned.plan, dataset=dataset, trained=trained, metrics=metrics)
