"""Scheduled launch plans, at most one run of each at a time. They are registered inactive.

pyflyte launchplan nightly --activate

Add your own here with one call of `scheduled`. See docs/schedules.md.
"""

from pathlib import Path

from flytekit import (
    ConcurrencyLimitBehavior,
    ConcurrencyPolicy,
    CronSchedule,
    Email,
    LaunchPlan,
    Slack,
    WorkflowExecutionPhase,
)
from flytekit.core.notification import Notification

from flytune.recipe import Notify
from flytune.stages.declared import scheduled_inputs
from workflows.refresh import refresh

_PHASES = {
    "succeeded": [WorkflowExecutionPhase.SUCCEEDED],
    "failed": [
        WorkflowExecutionPhase.FAILED,
        WorkflowExecutionPhase.ABORTED,
        WorkflowExecutionPhase.TIMED_OUT,
    ],
}


def scheduled(name: str, recipe_file: str | Path, cron: str, accepted: str, days: int) -> LaunchPlan:
    """Return a launch plan that refreshes a model on the data of the `days` before each kickoff.

    Args:
        name: name of the launch plan, unique.
        recipe_file: recipe, read now and fixed; a relative path starts in recipes/.
        cron: five fields in UTC: `0 2 * * 1` is Mondays at two.
        accepted: folder or fsspec address of the history of accepted models.

    Raises:
        RecipeError: the recipe cannot be scheduled (flytune/stages/declared.py: scheduled_inputs).
    """
    inputs = scheduled_inputs(f"launch plan {name}", recipe_file, accepted, days)
    return LaunchPlan.get_or_create(
        name=name,
        workflow=refresh,
        fixed_inputs=inputs,
        schedule=CronSchedule(schedule=cron, kickoff_time_input_arg="kickoff"),
        notifications=notifications(inputs["recipe"].notify),
        # A run that outlasts the time to the next is left alone; that next one is left out.
        concurrency=ConcurrencyPolicy(max_concurrency=1, behavior=ConcurrencyLimitBehavior.SKIP),
    )


def notifications(notify: Notify) -> list[Notification]:
    """Mail and Slack (by a channel's mail address), as a recipe asks for them."""
    phases = [phase for outcome in notify.on for phase in _PHASES[outcome]]
    kinds = ((Email, notify.email), (Slack, notify.slack))
    return [kind(phases=phases, recipients_email=to) for kind, to in kinds if to and phases]


nightly = scheduled("nightly", "refresh-lora.yaml", "0 2 * * *", "s3://your-bucket/accepted/nightly", days=1)
weekly = scheduled("weekly", "refresh-lora.yaml", "0 2 * * 1", "s3://your-bucket/accepted/weekly", days=7)
