"""Scheduled fine-tuning on new data; only a better model replaces the champion. See docs/schedules.md.

flyte run --local flyte2/refresh.py refresh --recipe RECIPE --kickoff 2026-11-21T02:00:00 --accepted ADDRESS
--days 1
"""

from typing import Any

from flyte2 import approval, wiring
from flyte2.driver import workflow
from flyte2.stages import call
from flytune.recipe import Recipe
from flytune.stages.table import COMPARE_MODELS, DECIDE, PROMOTE, ROLLBACK, SKIP


async def _challenge(
    recipe: Recipe, challenger: Recipe, accepted: str, champion: str, fingerprint: str
) -> str:
    """Fine-tune the recipe `challenger`, compare its model with the champion, and record the decision under
    `recipe`."""
    async with wiring.reported(challenger):
        results = await wiring.wire(await wiring.planned(challenger))
    inputs: dict[str, Any] = {name: results[name] for name in ("artifact", "dataset")} | {
        "base": results["base_files"]
    }
    comparison = await call(COMPARE_MODELS, results["shape"])(recipe=challenger, champion=champion, **inputs)
    decision = {"recipe": recipe, "accepted": accepted, "champion": champion, "fingerprint": fingerprint}
    outcome: str = await call(PROMOTE)(
        challenger=challenger, artifact=results["artifact"], comparison=comparison, **decision
    )
    if recipe.publish.approval is not None:
        outcome = await approval.outcome(recipe, results["artifact"]) or outcome
    return outcome


@workflow
async def refresh(recipe: Any, kickoff: Any, accepted: Any, days: Any) -> Any:
    asked = {"recipe": recipe, "kickoff": kickoff, "accepted": accepted, "days": days}
    action, challenger, champion, fingerprint, reason = await call(DECIDE)(**asked)
    if action == "train":
        return await _challenge(recipe, challenger, accepted, champion, fingerprint)
    return await call(SKIP)(reason=reason)


@workflow
async def rollback(accepted: Any, reason: Any) -> Any:
    return await call(ROLLBACK)(accepted=accepted, reason=reason)
