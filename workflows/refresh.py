"""Fine-tuning on fresh data, and a champion that only a better model replaces. See docs/schedules.md.

pyflyte run workflows/refresh.py refresh --recipe RECIPE --kickoff 2026-11-21T02:00:00 --accepted ADDRESS --days 1
"""

from datetime import datetime
from typing import NamedTuple

from flytekit import conditional, workflow
from flytekit.types.directory import FlyteDirectory

from flytune.recipe.recipe import Recipe
from tasks.promote import COMPARE, promote_challenger, rollback_accepted
from tasks.refresh import decide_refresh, skip_refresh
from tasks.report import report_failure
from workflows.finetune import prepared, stored
from workflows.routing import apart, on


class Tuned(NamedTuple):
    """An artifact, and what it is compared on; `shape` names the compare task."""

    artifact: FlyteDirectory
    shape: str
    dataset: FlyteDirectory
    base: FlyteDirectory


@workflow(on_failure=report_failure)
def train_challenger(recipe: Recipe) -> Tuned:
    """Run finetune, and hand on what comparing needs as well."""
    planned, dataset, base = prepared(recipe)
    return Tuned(stored(recipe, planned, dataset, base), planned.shape, dataset, base)


@workflow
def challenge(recipe: Recipe, changed: Recipe, accepted: str, champion: str, fingerprint: str) -> str:
    """Finetune the `changed` recipe, hold its model against the champion, record what became of it under `recipe`."""
    tuned = train_challenger(recipe=changed)
    inputs = {"recipe": changed, "artifact": tuned.artifact, "dataset": tuned.dataset, "base": tuned.base}
    duel = on("compare", tuned.shape, COMPARE, champion=champion, **inputs)
    told: str = promote_challenger(
        recipe=recipe,
        accepted=accepted,
        champion=champion,
        fingerprint=fingerprint,
        changed=changed,
        artifact=tuned.artifact,
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
