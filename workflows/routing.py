"""Which branch is taken: by the machines that a plan chose, or by what was decided."""

from functools import partial
from typing import Any

from flytekit import FlyteContextManager, conditional, map_task
from flytekit.core.context_manager import BranchEvalMode

from tasks.runtime.schema import trimmed


def on(name: str, choice: Any, tasks: dict[str, Any], **inputs: Any) -> Any:
    """Runs the one task whose key equals `choice`, with `inputs`; a Flyte condition over all keys."""
    branch: Any = conditional(name)
    for position, (key, task) in enumerate(tasks.items()):
        case = branch.if_(choice == key) if position == 0 else branch.elif_(choice == key)
        branch = case.then(task(**inputs))
    return branch.else_().fail(
        f"{name}: no such shape is registered; name a row of shapes.yaml, and register again after it changed"
    )


def apart(workflow: Any, **inputs: Any) -> Any:
    """Runs a workflow that has conditions of its own within the branch of another condition.

    Local runs of flytekit 1.16 take a condition within a taken branch for a part of the outer one: they run its first case
    whatever it says, and skip what comes after it. Here it begins anew; a cluster has no such trouble.
    """
    context = FlyteContextManager.current_context()
    state = context.execution_state
    if context.compilation_state or state is None or state.branch_eval_mode != BranchEvalMode.BRANCH_ACTIVE:
        return workflow(**inputs)
    builder = context.with_execution_state(context.new_execution_state().with_params(mode=state.mode))
    builder.in_a_condition = False
    with FlyteContextManager.with_context(builder):
        return workflow(**inputs)


def each_on(name: str, choice: Any, tasks: dict[str, Any], over: dict[str, Any], **inputs: Any) -> Any:
    """Like `on`, with the task mapped over the one list in `over`: a pod for each item, none for an empty list."""
    return on(name, choice, {key: trimmed(map_task(partial(task, **inputs))) for key, task in tasks.items()}, **over)
