"""Parts of finetune as workflows, for use from the command line and the console.

pyflyte run workflows/parts.py plan_only --recipe recipes/demo-qlora.yaml
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from flytune.recipe import Recipe
from flytune.records import Metrics, Plan
from tasks.checkpoint import find_checkpoint
from tasks.harness import combine_tasks
from tasks.plan import make_plan
from tasks.prepare import prepare_data
from tasks.report import report_failure
from workflows.wiring import stages_of, values_of, wire


@workflow
def plan_only(recipe: Recipe) -> Plan:
    """Plan the recipe: whether it fits, on which shape, why, and at what cost; no GPU is requested."""
    plan: Plan = make_plan(recipe=recipe).plan
    return plan


@workflow
def prepare_only(recipe: Recipe) -> FlyteDirectory:
    """Prepare the data set; a later finetune with the same data, tokenizer and data section takes it from the
    cache."""
    planned = make_plan(recipe=recipe)
    dataset: FlyteDirectory = prepare_data(request=planned.request, scratch_folder=planned.scratch_folder)
    return dataset


@workflow
def evaluate_only(recipe: Recipe, artifact: FlyteDirectory) -> Metrics:
    """Compare a stored artifact with its base model again, on the recipe's held-out data as it is now."""
    values = wire(stages_of("prepare"), values_of(make_plan(recipe=recipe)))
    made = wire(stages_of("evaluate"), values | {"trained": artifact})
    inputs = {name: made[name] for name in ("recipe", "metrics", "answers", "harness_data")}
    metrics: Metrics = combine_tasks(**inputs)
    return metrics


@workflow(on_failure=report_failure)
def resume(recipe: Recipe) -> FlyteDirectory:
    """Resume from the run's newest complete checkpoint; fail if there is none."""
    return _from_checkpoint(recipe, is_export_only=False)


@workflow(on_failure=report_failure)
def export_only(recipe: Recipe) -> FlyteDirectory:
    """Export, evaluate and store the run's newest complete checkpoint without further training; keep the
    checkpoint."""
    return _from_checkpoint(recipe, is_export_only=True)


def _from_checkpoint(recipe: Recipe, is_export_only: bool) -> FlyteDirectory:
    values = wire(stages_of("prepare"), values_of(make_plan(recipe=recipe), is_export_only))
    found = find_checkpoint(recipe=recipe, dataset=values["dataset"])
    # The stages that follow take the recipe of the check, and so wait for it.
    made = wire(stages_of("train", "evaluate", "store"), values | {"recipe": found})
    artifact: FlyteDirectory = made["artifact"]
    return artifact
