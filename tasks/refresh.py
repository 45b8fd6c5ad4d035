"""Decision of a scheduled refresh, on a CPU: train on the window's data, or skip."""

import logging
from datetime import datetime
from typing import NamedTuple

from flytekit import Resources, task

from flytune.failures.table import RETRIES
from flytune.recipe import Recipe
from flytune.registry import refresh
from images import LIGHT
from tasks.runtime.retries import classify_failures
from tasks.runtime.schema import without_schema
from tasks.runtime.secrets import secrets
from tasks.runtime.volumes import light_pod

logger = logging.getLogger(__name__)
_POD = Resources(cpu="1", mem="2Gi")


class RefreshOutput(NamedTuple):
    """Decision: `action` is `train` or `skip`, `challenger` the recipe to train, `champion` the accepted artifact or empty."""

    action: str
    challenger: Recipe
    champion: str
    fingerprint: str
    reason: str


@without_schema
@task(container_image=LIGHT, pod_template=light_pod(), requests=_POD, retries=RETRIES, secret_requests=secrets("hub"))
def decide_refresh(recipe: Recipe, kickoff: datetime, accepted: str, days: int) -> RefreshOutput:
    """Decide from the window's data and the history of accepted models."""
    with classify_failures():
        decision = refresh.decide(recipe, kickoff, accepted, days)
    return RefreshOutput("train" if decision.trains else "skip", *decision[1:])


@without_schema
@task(container_image=LIGHT, pod_template=light_pod(), requests=_POD)
def skip_refresh(reason: str) -> str:
    """Log and return the reason why nothing was trained."""
    logger.info("skipped: %s", reason)
    return f"skipped: {reason}"
