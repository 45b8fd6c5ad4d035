"""Scheduled fine-tuning on new data; only a better model replaces the champion. See docs/schedules.md.

pyflyte run workflows/refresh.py refresh --recipe RECIPE --kickoff 2026-11-21T02:00:00 --accepted ADDRESS
--days 1
"""

from typing import Any, NamedTuple

from flytekit import conditional, workflow
from flytekit.types.directory import FlyteDirectory

from flytune.recipe import Recipe
from tasks.plan import make_plan
from tasks.promote import COMPARE, promote_challenger, rollback_accepted
from tasks.refresh import decide_refresh, skip_refresh
from tasks.report import report_failure
from tasks.runtime.schema import without_schema
from workflows import routing
from workflows.routing import route_to, run_inline
from workflows.wiring import stages_of, values_of, wire


class ChallengerOutput(NamedTuple):
    """An artifact with the data set and base model of its comparison; `shape` names the compare task."""

    artifact: FlyteDirectory
    shape: str
    dataset: FlyteDirectory
    base: FlyteDirectory


@without_schema
@workflow(on_failure=report_failure)
def train_challenger(recipe: Recipe) -> ChallengerOutput:
    """Fine-tune, and also return the inputs of the comparison."""
    results = wire(stages_of(), values_of(make_plan(recipe=recipe)))
    return ChallengerOutput(results["artifact"], results["shape"], results["dataset"], results["base_files"])


@without_schema
@workflow
def challenge(recipe: Recipe, challenger: Recipe, accepted: str, champion: str, fingerprint: str) -> str:
    """Fine-tune the recipe `challenger`, compare its model with the champion, and record the decision under
    `recipe`."""
    tuned = train_challenger(recipe=challenger)
    inputs = {"recipe": challenger, "artifact": tuned.artifact, "dataset": tuned.dataset, "base": tuned.base}
    comparison = route_to("compare", tuned.shape, COMPARE, champion=champion, **inputs)
    about = {"recipe": recipe, "accepted": accepted, "champion": champion, "fingerprint": fingerprint}
    outcome: str = promote_challenger(
        **about, challenger=challenger, artifact=tuned.artifact, comparison=comparison
    )
    return outcome


@routing.workflow()
def refresh(recipe: Any, kickoff: Any, accepted: Any, days: Any) -> Any:
    decided = decide_refresh(recipe=recipe, kickoff=kickoff, accepted=accepted, days=days)
    inputs = {name: getattr(decided, name) for name in ("challenger", "champion", "fingerprint")}
    branch = conditional("refresh").if_(decided.action == "train")
    branch = branch.then(run_inline(challenge, recipe=recipe, accepted=accepted, **inputs))
    return branch.else_().then(skip_refresh(reason=decided.reason))


@routing.workflow()
def rollback(accepted: Any, reason: Any) -> Any:
    return rollback_accepted(accepted=accepted, reason=reason)
