"""Parts of finetune as workflows, for use from the command line and the console.

pyflyte run workflows/parts.py plan_only --recipe recipes/demo-qlora.yaml
"""

from typing import Any

from tasks.checkpoint import find_checkpoint
from tasks.harness import combine_tasks
from tasks.plan import make_plan
from tasks.prepare import prepare_data
from tasks.report import report_failure
from workflows.routing import workflow
from workflows.wiring import stages_of, values_of, wire


@workflow()
def plan_only(recipe: Any) -> Any:
    return make_plan(recipe=recipe).plan


@workflow()
def prepare_only(recipe: Any) -> Any:
    planned = make_plan(recipe=recipe)
    return prepare_data(request=planned.request, scratch_folder=planned.scratch_folder)


@workflow()
def evaluate_only(recipe: Any, artifact: Any) -> Any:
    values = wire(stages_of("prepare"), values_of(make_plan(recipe=recipe)))
    values = wire(stages_of("evaluate"), values | {"trained": artifact})
    return combine_tasks(**{name: values[name] for name in ("recipe", "metrics", "answers", "harness_data")})


@workflow(on_failure=report_failure)
def resume(recipe: Any) -> Any:
    return _from_checkpoint(recipe, is_export_only=False)


@workflow(on_failure=report_failure)
def export_only(recipe: Any) -> Any:
    return _from_checkpoint(recipe, is_export_only=True)


def _from_checkpoint(recipe: Any, is_export_only: bool) -> Any:
    values = wire(stages_of("prepare"), values_of(make_plan(recipe=recipe), is_export_only))
    checked = find_checkpoint(recipe=recipe, dataset=values["dataset"])
    # The stages that follow take the recipe of the check, and so wait for it.
    return wire(stages_of("train", "evaluate", "store"), values | {"recipe": checked})["artifact"]
