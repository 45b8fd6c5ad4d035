"""From a recipe to a stored artifact.

pyflyte run workflows/finetune.py finetune --recipe recipes/demo-qlora.yaml
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from flytune.recipe import Recipe
from tasks.evaluate import EVALUATE
from tasks.plan import make_plan
from tasks.prepare import prepare_data
from tasks.store import store_artifact
from tasks.train import TRAIN
from workflows.routing import on


@workflow
def finetune(recipe: Recipe) -> FlyteDirectory:
    """Plan, prepare the data, train on the plan's machines, evaluate the export, store one artifact."""
    planned = make_plan(recipe=recipe)
    dataset = prepare_data(request=planned.request, keep=planned.keep)
    trained = on("train", planned.route, TRAIN, recipe=recipe, plan=planned.plan, dataset=dataset)
    metrics = on("evaluate", planned.shape, EVALUATE, recipe=recipe, trained=trained, dataset=dataset)
    return store_artifact(recipe=recipe, plan=planned.plan, dataset=dataset, trained=trained, metrics=metrics)
