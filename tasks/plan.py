"""Plan, on a CPU, before anything is rented: what cannot fit or cannot be read is refused here."""

from typing import NamedTuple

from flytekit import Deck, Resources, task

from flytune import bases, counting, data, evaluating, plan_table, planner, publishing
from flytune.bases import BaseRequest
from flytune.failures import RETRIES
from flytune.plans import Plan
from flytune.recipe import DataRequest, Recipe
from flytune.strategies import route
from images import LIGHT
from tasks.folders import is_local, placed
from tasks.interfaces import trimmed
from tasks.retrying import retried
from tasks.secrets import secrets


class Planned(NamedTuple):
    """`route` names the train task, `shape` the evaluate task; Flyte's conditions compare primitives only.

    `keep` is the folder that all attempts see; `base` names the commit that the base model is at.
    """

    plan: Plan
    route: str
    shape: str
    request: DataRequest
    keep: str
    base: BaseRequest


@trimmed
@task(
    container_image=LIGHT,
    requests=Resources(cpu="1", mem="2Gi"),
    retries=RETRIES,
    secret_requests=secrets("hub"),
    enable_deck=True,
    deck_fields=(),
)
def make_plan(recipe: Recipe) -> Planned:
    """Plans a recipe, and names the content that its data has now."""
    with retried():
        plan = planner.make(recipe, samples=counting.samples_guess(recipe.data))
        Deck("plan", plan_table.as_html(plan))
        publishing.check(recipe)
        base = bases.request(recipe.model)
        if not is_local():
            bases.known(base, recipe.model)
        request = DataRequest(
            model=bases.pinned(recipe.model, base.commit),
            data=recipe.data,
            fingerprint=data.fingerprint(recipe.data),
            tokenizer=bases.tokenizer_identity(recipe.model),
        )
        shape = evaluating.shape_for(recipe, plan)
    return Planned(plan, route(recipe, plan), shape.name, request, placed(recipe).checkpoints.home, base)
