"""Tests of the scheduled launch plans in serialized form."""

from collections import OrderedDict

import pytest
from flyteidl.admin.launch_plan_pb2 import ConcurrencyLimitBehavior
from flytekit.core.launch_plan import LaunchPlan
from flytekit.core.type_engine import TypeEngine
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.tools.translator import get_serializable

from flytune.errors import RecipeError
from flytune.recipe import Notify, Recipe
from tests.support.recipes import content
from tests.support.registration import SETTINGS
from workflows.schedules import nightly, notifications, scheduled, weekly


def proto(plan):
    """Return the launch plan that `pyflyte register` sends."""
    entities = OrderedDict()
    get_serializable(entities, SETTINGS, plan.workflow)
    return get_serializable(entities, SETTINGS, plan).to_flyte_idl().spec


@pytest.mark.parametrize(("plan", "cron", "days"), [(nightly, "0 2 * * *", 1), (weekly, "0 2 * * 1", 7)])
def test_a_plan_s_schedule_inputs_and_concurrency(plan, cron, days):
    spec = proto(plan)
    assert spec.workflow_id.name == "workflows.refresh.refresh"
    schedule = spec.entity_metadata.schedule
    assert (schedule.cron_schedule.schedule, schedule.kickoff_time_input_arg) == (cron, "kickoff")
    assert set(spec.fixed_inputs.literals) == {"recipe", "accepted", "days"}
    assert spec.fixed_inputs.literals["days"].scalar.primitive.integer == days
    # Only the kickoff is left to the scheduler.
    assert [name for name, given in spec.default_inputs.parameters.items() if given.required] == ["kickoff"]
    assert (spec.concurrency_policy.max, spec.concurrency_policy.behavior) == (
        1,
        ConcurrencyLimitBehavior.CONCURRENCY_LIMIT_BEHAVIOR_SKIP,
    )
    assert not plan.should_auto_activate


@pytest.fixture
def plans():
    """Remove the launch plans of a test after it."""
    before = dict(LaunchPlan.CACHE)
    yield
    LaunchPlan.CACHE.clear()
    LaunchPlan.CACHE.update(before)


def write_recipe(folder, **changes):
    import yaml

    recipe = content(
        data={"path": "s3://b/%Y-%m-%d.jsonl", "heldout_path": "s3://b/heldout.jsonl"}, **changes
    )
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def test_another_schedule_is_one_call(tmp_path, plans):
    notify = {"on": ["succeeded", "failed"], "email": ["a@b.c"], "slack": ["x@y.slack.com"]}
    file = write_recipe(tmp_path, notify=notify)
    plan = scheduled("mine", file, "30 4 * * 2", "s3://b/accepted", days=3)
    spec = proto(plan)
    mail, slack = spec.entity_metadata.notifications
    assert (list(mail.email.recipients_email), list(slack.slack.recipients_email)) == (
        ["a@b.c"],
        ["x@y.slack.com"],
    )
    over = {WorkflowExecutionPhase.SUCCEEDED, WorkflowExecutionPhase.FAILED}
    assert (
        set(mail.phases)
        == set(slack.phases)
        == over | {WorkflowExecutionPhase.ABORTED, WorkflowExecutionPhase.TIMED_OUT}
    )
    literal = spec.fixed_inputs.literals["recipe"]
    from flytekit import FlyteContextManager
    from flytekit.models.literals import Literal

    context = FlyteContextManager.current_context()
    assert TypeEngine.to_python_value(context, Literal.from_flyte_idl(literal), Recipe) == Recipe.from_yaml(
        file
    )


def test_notifications_by_phase():
    assert notifications(Notify()) == []
    assert notifications(Notify(on=[], email=["a@b.c"])) == []
    (mail,) = notifications(Notify(email=["a@b.c"]))
    assert WorkflowExecutionPhase.SUCCEEDED not in mail.phases
    assert WorkflowExecutionPhase.FAILED in mail.phases


def test_a_recipe_that_cannot_be_compared_is_refused_before_it_is_registered(tmp_path):
    import yaml

    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content()))
    with pytest.raises(
        RecipeError, match=r"data\.heldout_path is missing: champion and challenger are compared"
    ):
        scheduled("mine", tmp_path / "recipe.yaml", "0 2 * * *", "s3://b/accepted", days=1)
