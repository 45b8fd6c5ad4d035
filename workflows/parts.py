"""The parts of finetune by themselves, for who works from the console.

pyflyte run workflows/parts.py plan_only --recipe recipes/demo-qlora.yaml
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from flytune.recipe.recipe import Recipe
from flytune.records.metrics import Metrics
from flytune.records.plan import Plan
from tasks.checkpoint import find_checkpoint
from tasks.harness import combine_tasks
from tasks.plan import make_plan
from tasks.prepare import prepare_data
from tasks.report import report_failure
from workflows.finetune import evaluated, prepared, stored


@workflow
def plan_only(recipe: Recipe) -> Plan:
    """Whether the recipe fits, on what, why, and for how much; nothing is rented."""
    plan: Plan = make_plan(recipe=recipe).plan
    return plan


@workflow
def prepare_only(recipe: Recipe) -> FlyteDirectory:
    """The prepared data set; a later finetune of the same data, tokenizer and data section takes it from the cache."""
    planned = make_plan(recipe=recipe)
    dataset: FlyteDirectory = prepare_data(request=planned.request, keep=planned.keep)
    return dataset


@workflow
def evaluate_only(recipe: Recipe, artifact: FlyteDirectory) -> Metrics:
    """A stored artifact held against its base model once more, on the recipe's held-out data as it is now."""
    planned, dataset, base = prepared(recipe)
    metrics, answers = evaluated(recipe, planned, dataset, base, artifact)
    found: Metrics = combine_tasks(recipe=recipe, metrics=metrics, answers=answers, data=planned.data)
    return found


@workflow(on_failure=report_failure)
def resume(recipe: Recipe) -> FlyteDirectory:
    """Finetune from the run's newest whole checkpoint; refused where there is none."""
    return _from_checkpoint(recipe, is_export_only=False)


@workflow(on_failure=report_failure)
def export_only(recipe: Recipe) -> FlyteDirectory:
    """The run's newest whole checkpoint exported, evaluated and stored without a further step; the checkpoint stays."""
    return _from_checkpoint(recipe, is_export_only=True)


def _from_checkpoint(recipe: Recipe, is_export_only: bool) -> FlyteDirectory:
    planned, dataset, base = prepared(recipe)
    found = find_checkpoint(recipe=recipe, dataset=dataset)
    artifact: FlyteDirectory = stored(found, planned, dataset, base, is_export_only)
    return artifact
