"""Plan of a run, made on a CPU: a recipe that cannot fit or cannot be read is refused before a GPU is requested."""

from typing import NamedTuple

from flytekit import Deck, Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune import data
from flytune.artifacts import publish
from flytune.evaluation.harness.run import Job
from flytune.failures.table import RETRIES
from flytune.hardware import load_cluster
from flytune.models import BaseRequest
from flytune.models import base as models_base
from flytune.planning import evaluation_shape, planner, sample_count, table
from flytune.planning import reference_shape as planning_reference_shape
from flytune.recipe import DataRequest, Recipe
from flytune.records import Plan
from flytune.sharding import route
from flytune.sweeps import Run
from flytune.training import reference
from flytune.training.reference import ReferenceRequest
from images import LIGHT, TRAIN
from tasks.runtime.directories import is_local, with_checkpoint_folder
from tasks.runtime.harness_data import HarnessData
from tasks.runtime.retries import classify_failures
from tasks.runtime.schema import without_schema
from tasks.runtime.secrets import secrets
from tasks.runtime.volumes import light_pod

PLAN_IMAGE = TRAIN if load_cluster().plan_in_training_image else LIGHT
"""Image of the tasks that plan."""


class PlanOutput(NamedTuple):
    """Plan and inputs of the tasks that follow.

    `route` names the train task and `shape` the evaluate task: Flyte's conditions compare primitives only. `scratch_folder` is
    shared by all attempts; `base` names the base model's commit; `jobs` are the parts of the harness's tasks, `harness_data` is
    their data; `references` ask for a reference model's log-probabilities, on `reference_shape`.
    """

    plan: Plan
    route: str
    shape: str
    request: DataRequest
    scratch_folder: str
    base: BaseRequest
    jobs: list[Job]
    harness_data: FlyteDirectory
    references: list[ReferenceRequest]
    reference_shape: str


@without_schema
@task(
    container_image=PLAN_IMAGE,
    pod_template=light_pod(),
    # Memory for the harness, which loads its tasks' data.
    requests=Resources(cpu="2", mem="8Gi"),
    retries=RETRIES,
    secret_requests=secrets("hub"),
    enable_deck=True,
    deck_fields=(),
)
def make_plan(recipe: Recipe) -> PlanOutput:
    """Plan a recipe, record a fingerprint of its data as it is now, and check its evaluation tasks."""
    harness = HarnessData()
    with classify_failures():
        run = plan_run(recipe, harness)
    Deck("plan", table.as_html(run.plan))
    with classify_failures():
        references = reference.requests(recipe, run.request, run.base)
        reference_shape = planning_reference_shape.shape_for(recipe, run.plan).name if references else run.shape
    return PlanOutput(
        plan=run.plan,
        route=run.route,
        shape=run.shape,
        request=run.request,
        scratch_folder=run.scratch_folder,
        base=run.base,
        jobs=run.jobs,
        harness_data=harness.stored(),
        references=references,
        reference_shape=reference_shape,
    )


def plan_run(recipe: Recipe, harness: HarnessData) -> Run:
    """Return a recipe's run, with everything that its tasks depend on; add the data of its evaluation tasks to `harness`."""
    cluster = None if is_local() else load_cluster()
    plan = planner.make(recipe, samples=sample_count.samples_guess(recipe.data), cluster=cluster)
    publish.check(recipe)
    base = models_base.request(recipe.model)
    if not is_local():
        models_base.require_commit(base, recipe.model)
    request = DataRequest(
        model=models_base.pinned(recipe.model, base.commit),
        data=recipe.data,
        fingerprint=data.fingerprint(recipe.data),
        tokenizer=models_base.tokenizer_identity(recipe.model),
        pairs=recipe.objective.has_pairs,
        labels=recipe.objective.has_labels,
    )
    shape = evaluation_shape.shape_for(recipe, plan)
    return Run(
        recipe=recipe,
        plan=plan,
        route=route(recipe, plan),
        shape=shape.name,
        request=request,
        base=base,
        scratch_folder=with_checkpoint_folder(recipe).checkpoints.home,
        jobs=harness.jobs(recipe),
    )
