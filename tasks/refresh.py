"""Refresh, on a CPU: whether a kickoff's data is worth a run."""

import logging
from datetime import datetime
from typing import NamedTuple

from flytekit import Resources, task

from flytune.failures.table import RETRIES
from flytune.recipe.recipe import Recipe
from flytune.registry import refresh
from images import LIGHT
from tasks.runtime.retries import retried
from tasks.runtime.schema import trimmed
from tasks.runtime.secrets import secrets

logger = logging.getLogger(__name__)
_POD = Resources(cpu="1", mem="2Gi")


class Decided(NamedTuple):
    """`go` is `train` or `skip`; `changed` is the recipe to train, `champion` the accepted artifact or empty."""

    go: str
    changed: Recipe
    champion: str
    fingerprint: str
    reason: str


@trimmed
@task(container_image=LIGHT, requests=_POD, retries=RETRIES, secret_requests=secrets("hub"))
def decide_refresh(recipe: Recipe, kickoff: datetime, accepted: str, days: int) -> Decided:
    """Looks at the window's data and at the history of accepted models."""
    with retried():
        decision = refresh.decide(recipe, kickoff, accepted, days)
    return Decided("train" if decision.trains else "skip", *decision[1:])


@trimmed
@task(container_image=LIGHT, requests=_POD)
def skip_refresh(reason: str) -> str:
    """Says why nothing was trained."""
    logger.info("skipped: %s", reason)
    return f"skipped: {reason}"
