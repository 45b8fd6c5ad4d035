"""Declaration of workflows, and conditions over tasks: routing to the task of a shape, and workflows within a
branch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flytekit
from flytekit import FlyteContextManager, conditional, map_task
from flytekit.core.context_manager import BranchEvalMode

from flytune.stages.declared import as_workflow
from tasks.runtime.schema import without_schema
from tasks.runtime.values import TYPES


def workflow(on_failure: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator of a workflow that declared.py declares; the task `on_failure` reports a failed
    run."""

    def declare(body: Callable[..., Any]) -> Any:
        return flytekit.workflow(as_workflow(body, TYPES), on_failure=on_failure)

    return declare


def route_to(name: str, choice: Any, tasks: dict[str, Any], **inputs: Any) -> Any:
    """Run the task whose key equals `choice`, with `inputs`: a Flyte condition over all keys."""
    branch: Any = conditional(name)
    for position, (key, task) in enumerate(tasks.items()):
        case = branch.if_(choice == key) if position == 0 else branch.elif_(choice == key)
        branch = case.then(task(**inputs))
    return branch.else_().fail(
        f"{name}: no such shape is registered; name a row of shapes.yaml, and register again after it changed"
    )


def run_inline(workflow: Any, **inputs: Any) -> Any:
    """Run a workflow that has conditions within the branch of another condition.

    Local runs of flytekit 1.16 treat a condition within a taken branch as part of the outer condition: they
    run its first case whatever its test says, and skip what follows. This function hides the outer condition;
    clusters do not need it.
    """
    context = FlyteContextManager.current_context()
    state = context.execution_state
    if context.compilation_state or state is None or state.branch_eval_mode != BranchEvalMode.BRANCH_ACTIVE:
        return workflow(**inputs)
    builder = context.with_execution_state(context.new_execution_state().with_params(mode=state.mode))
    builder.in_a_condition = False
    with FlyteContextManager.with_context(builder):
        return workflow(**inputs)


def map_on(name: str, choice: Any, tasks: dict[str, Any], over: dict[str, Any], **inputs: Any) -> Any:
    """Run like `route_to`, with the task mapped over the list in `over`: one pod for each item, none for an
    empty list."""
    return route_to(
        name,
        choice,
        {key: without_schema(map_task(partial(task, **inputs))) for key, task in tasks.items()},
        **over,
    )
