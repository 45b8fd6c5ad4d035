"""Decision of a scheduled refresh, on a CPU: train on the window's data, or skip."""

import logging
from datetime import datetime
from typing import NamedTuple

from flytune.artifacts import publish
from flytune.cluster import uploads
from flytune.recipe import Recipe
from flytune.registry import refresh
from flytune.stages.orchestrator import Orchestrator

logger = logging.getLogger(__name__)


class RefreshOutput(NamedTuple):
    """Decision: `action` is `train` or `skip`, `challenger` the recipe to train, `champion` the accepted
    artifact or empty."""

    action: str
    challenger: Recipe
    champion: str
    fingerprint: str
    reason: str


def decide_refresh(
    orchestrator: Orchestrator, recipe: Recipe, kickoff: datetime, accepted: str, days: int
) -> RefreshOutput:
    """Decide from the window's data and the history of accepted models."""
    if not orchestrator.is_local():
        # Else each kickoff would find no data in its window, and skip.
        uploads.refuse_absent(recipe)
    if recipe.publish.approval is not None:
        # The plan of the challenger, which is published later, does not.
        publish.check(recipe)
    decision = refresh.decide(recipe, kickoff, accepted, days)
    return RefreshOutput("train" if decision.trains else "skip", *decision[1:])


def skip_refresh(reason: str) -> str:
    """Log and return the reason why nothing was trained."""
    logger.info("skipped: %s", reason)
    return f"skipped: {reason}"
