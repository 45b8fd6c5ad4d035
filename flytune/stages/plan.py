"""Plan of a run, made on a CPU: a recipe that cannot fit or cannot be read is refused before a GPU is
requested."""

from typing import NamedTuple

from flytune import data
from flytune.artifacts import publish
from flytune.cluster import uploads
from flytune.console import run_lines, step_lines
from flytune.dryrun import confirm
from flytune.hardware import Shape, load_cluster, load_shapes, this_machine
from flytune.models import base as models_base
from flytune.planning import planner, sample_count, stage_shapes, table
from flytune.recipe import DataRequest, Recipe
from flytune.sharding import route
from flytune.stages.harness import HarnessData
from flytune.stages.orchestrator import Folder, Orchestrator, Report
from flytune.stages.planned import Planned
from flytune.stages.stored import with_checkpoint_folder
from flytune.training import reference


class PlanOutput(NamedTuple):
    """The planned run, and the data of its evaluation tasks."""

    planned: Planned
    harness_data: Folder


def make_plan(orchestrator: Orchestrator, report: Report, recipe: Recipe) -> PlanOutput:
    """Plan a recipe, record a fingerprint of its data as it is now, and check its evaluation tasks."""
    harness = HarnessData(orchestrator)
    planned = plan_run(orchestrator, recipe, harness)
    step_lines.show(run_lines.plan_line(planned.plan, recipe.method.name, planned.recipe.sharding.name))
    report(table.as_html(planned.plan))
    return PlanOutput(planned, Folder.here(harness.complete()))


def plan_run(orchestrator: Orchestrator, recipe: Recipe, harness: HarnessData) -> Planned:
    """Return a recipe's run, with everything that its stages depend on; add the data of its evaluation tasks
    to `harness`."""
    cluster = None if orchestrator.is_local() else load_cluster()
    if cluster is not None:
        uploads.refuse_absent(recipe)
    count = sample_count.counted(recipe)
    recipe, plan = planner.decide(
        recipe, _shapes(orchestrator, recipe), samples=count.samples, cluster=cluster, trace=confirm.best_fit
    )
    plan = sample_count.with_origin(plan, count)
    publish.check(recipe)
    base = models_base.request(recipe.model)
    if not orchestrator.is_local():
        models_base.require_commit(base, recipe.model)
    model, tokenizer = (
        models_base.pinned(recipe.model, base.commit),
        models_base.tokenizer_identity(recipe.model),
    )
    request = DataRequest.of(recipe, data.fingerprint(recipe.data), model=model, tokenizer=tokenizer)
    shape, references = (
        stage_shapes.evaluation_shape(recipe, plan).name,
        reference.requests(recipe, request, base),
    )
    return Planned(
        recipe=recipe,
        plan=plan,
        route=route(plan),
        shape=shape,
        request=request,
        base=base,
        scratch_folder=with_checkpoint_folder(orchestrator, recipe).checkpoints.home,
        jobs=harness.jobs(recipe),
        references=references,
        reference_shape=stage_shapes.reference_shape(recipe, plan).name if references else shape,
    )


def _shapes(orchestrator: Orchestrator, recipe: Recipe) -> tuple[Shape, ...]:
    """Return the rows that a run may be planned on: without a cluster and without a named one, those of this
    machine."""
    if not orchestrator.is_local():
        return load_shapes()
    here = this_machine.rows()
    if not orchestrator.runs_on_declared_rows():
        return here if recipe.hardware.shape == "auto" else (*load_shapes(), *here)
    wish, alike = recipe.hardware, tuple(shape for shape in load_shapes() if this_machine.has(here[0], shape))
    return alike if alike and (wish.shape, wish.accelerator) == ("auto", None) else load_shapes()
