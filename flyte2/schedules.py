"""Scheduled refreshes as triggers, which are deployed inactive. See docs/schedules.md.

flyte deploy flyte2/schedules.py driver

Add your own here with one call of `scheduled`. Flyte 2's open backend has no policy that leaves a run out
while the last one goes on: give a schedule more time than a run takes.
"""

from datetime import UTC, datetime
from pathlib import Path

import flyte
from flyte.models import ActionPhase
from flyte.notify import Email, Notification
from flyte.remote import Run

from flyte2.driver import driver
from flyte2.refresh import refresh
from flyte2.runtime.orchestrator import current
from flytune.recipe import Notify, Recipe
from flytune.stages.declared import scheduled_inputs


def scheduled(name: str, recipe_file: str | Path, cron: str, accepted: str, days: int) -> flyte.Trigger:
    """Return a trigger that refreshes a model on the data of the `days` before each kickoff.

    Args:
        name: name of the trigger, unique.
        recipe_file: recipe, read now and fixed; a relative path starts in recipes/.
        cron: five fields in UTC: `0 2 * * 1` is Mondays at two.
        accepted: folder or fsspec address of the history of accepted models.

    Raises:
        RecipeError: the recipe cannot be scheduled (flytune/stages/declared.py: scheduled_inputs).
    """
    # Not flyte.TriggerTime: the open backend's scheduler gives a run with it that input alone.
    inputs = scheduled_inputs(f"trigger {name}", recipe_file, accepted, days)
    rules = notifications(inputs["recipe"].notify) or None
    return flyte.Trigger(name, flyte.Cron(cron), inputs=inputs, auto_activate=False, notifications=rules)


_PHASES = {"succeeded": ("SUCCEEDED",), "failed": ("FAILED", "ABORTED", "TIMED_OUT")}


def notifications(notify: Notify) -> tuple[Notification, ...]:
    """Mail and Slack (by a channel's mail address), as a recipe asks for them."""
    phases = tuple(ActionPhase[name] for outcome in notify.on for name in _PHASES[outcome])
    return tuple(
        Email(on_phase=phases, recipients=tuple(to)) for to in (notify.email, notify.slack) if to and phases
    )


TRIGGERS = (
    scheduled("nightly", "refresh-lora.yaml", "0 2 * * *", "s3://your-bucket/accepted/nightly", days=1),
    scheduled("weekly", "refresh-lora.yaml", "0 2 * * 1", "s3://your-bucket/accepted/weekly", days=7),
)


@driver.task(triggers=TRIGGERS)
async def scheduled_refresh(recipe: Recipe, accepted: str, days: int) -> str:
    """Refresh a model on the data of the `days` before the run's start."""
    outcome: str = await refresh(recipe=recipe, kickoff=await _start(), accepted=accepted, days=days)
    return outcome


async def _start() -> datetime:
    """Return when this run started, by the control plane: pods of the open backend have 1970-01-01 as
    `run_start_time`."""
    if current().is_local():
        return datetime.now(UTC)
    run = await Run.get.aio(name=current().run)
    return run.action.start_time
