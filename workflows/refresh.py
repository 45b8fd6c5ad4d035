"""Fine-tuning on fresh data, and a champion that only a better model replaces. See docs/schedules.md.

pyflyte run workflows/refresh.py refresh --recipe RECIPE --kickoff 2026-11-21T02:00:00 --accepted ADDRESS --days 1
"""

from datetime import datetime

from flytekit import conditional, workflow

from flytune.recipe import Recipe
from tasks.base_model import fetch_base_model
from tasks.plan import make_plan
from tasks.prepare import prepare_data
from tasks.promote import COMPARE, promote_challenger, rollback_accepted
from tasks.refresh import decide_refresh, skip_refresh
from workflows.finetune import finetune
from workflows.routing import apart, on


@workflow
def challenge(recipe: Recipe, changed: Recipe, accepted: str, champion: str, fingerprint: str) -> str:
    """Finetune the `changed` recipe, hold its model against the champion, record what became of it under `recipe`."""
    artifact = finetune(recipe=changed)
    planned = make_plan(recipe=changed)
    # As finetune has prepared it: from the cache.
    dataset = prepare_data(request=planned.request, keep=planned.keep)
    base = fetch_base_model(base=planned.base)
    inputs = {"recipe": changed, "artifact": artifact, "dataset": dataset, "base": base, "champion": champion}
    duel = on("compare", planned.shape, COMPARE, **inputs)
    told: str = promote_challenger(
        recipe=recipe,
        accepted=accepted,
        champion=champion,
        fingerprint=fingerprint,
        changed=changed,
        artifact=artifact,
        duel=duel,
    )
    return told


@workflow
def refresh(recipe: Recipe, kickoff: datetime, accepted: str, days: int = 1) -> str:
    """Train on the data of the `days` before the kickoff, if there is any that is new, and accept the model if it is better."""
    decided = decide_refresh(recipe=recipe, kickoff=kickoff, accepted=accepted, days=days)
    given = {"changed": decided.changed, "champion": decided.champion, "fingerprint": decided.fingerprint}
    branch = conditional("refresh").if_(decided.go == "train")
    branch = branch.then(apart(challenge, recipe=recipe, accepted=accepted, **given))
    told: str = branch.else_().then(skip_refresh(reason=decided.reason))
    return told


@workflow
def rollback(accepted: str, reason: str = "rolled back by hand") -> str:
    """Accept the model before the accepted one again; returns its artifact's address."""
    back: str = rollback_accepted(accepted=accepted, reason=reason)
    return back
