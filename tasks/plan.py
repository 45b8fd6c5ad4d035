"""Plan, on a CPU, before anything is rented: what cannot fit, cannot be read or is unknown is refused here."""

from typing import NamedTuple

from flytekit import Deck, Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune import data
from flytune.artifacts import publish
from flytune.evaluation.harness.run import Job
from flytune.failures.table import RETRIES
from flytune.models import base as models_base
from flytune.models.base import BaseRequest
from flytune.planning import evaluation_shape, planner, sample_count, table
from flytune.recipe.recipe import DataRequest, Recipe
from flytune.records.plan import Plan
from flytune.sharding import route
from flytune.sweeps.points import Run
from images import LIGHT
from tasks.runtime.directories import is_local, placed
from tasks.runtime.harness_data import HarnessData
from tasks.runtime.retries import retried
from tasks.runtime.schema import trimmed
from tasks.runtime.secrets import secrets


class Planned(NamedTuple):
    """`route` names the train task, `shape` the evaluate task; Flyte's conditions compare primitives only.

    `keep` is the folder that all attempts see; `base` names the commit that the base model is at; `jobs` are the parts of the
    harness's tasks, and `data` is theirs.
    """

    plan: Plan
    route: str
    shape: str
    request: DataRequest
    keep: str
    base: BaseRequest
    jobs: list[Job]
    data: FlyteDirectory


@trimmed
@task(
    container_image=LIGHT,
    # The harness loads its tasks' data.
    requests=Resources(cpu="2", mem="8Gi"),
    retries=RETRIES,
    secret_requests=secrets("hub"),
    enable_deck=True,
    deck_fields=(),
)
def make_plan(recipe: Recipe) -> Planned:
    """Plan a recipe, name the content that its data has now, and check its evaluation tasks."""
    harness = HarnessData()
    with retried():
        run = planned(recipe, harness)
    Deck("plan", table.as_html(run.plan))
    return Planned(run.plan, run.route, run.shape, run.request, run.scratch_folder, run.base, run.jobs, harness.stored())


def planned(recipe: Recipe, harness: HarnessData) -> Run:
    """Return a recipe's run, with all that its tasks depend on; the data of its evaluation tasks goes to `harness`."""
    plan = planner.make(recipe, samples=sample_count.samples_guess(recipe.data))
    publish.check(recipe)
    base = models_base.request(recipe.model)
    if not is_local():
        models_base.require_commit(base, recipe.model)
    request = DataRequest(
        model=models_base.pinned(recipe.model, base.commit),
        data=recipe.data,
        fingerprint=data.fingerprint(recipe.data),
        tokenizer=models_base.tokenizer_identity(recipe.model),
    )
    shape = evaluation_shape.shape_for(recipe, plan)
    return Run(
        recipe=recipe,
        plan=plan,
        route=route(recipe, plan),
        shape=shape.name,
        request=request,
        base=base,
        scratch_folder=placed(recipe).checkpoints.home,
        jobs=harness.jobs(recipe),
    )
