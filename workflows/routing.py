"""The branch that a plan's choice of machines takes."""

from functools import partial
from typing import Any

from flytekit import conditional, map_task


def on(name: str, choice: Any, tasks: dict[str, Any], **inputs: Any) -> Any:
    """Runs the one task whose key equals `choice`, with `inputs`; a Flyte condition over all keys."""
    branch: Any = conditional(name)
    for position, (key, task) in enumerate(tasks.items()):
        case = branch.if_(choice == key) if position == 0 else branch.elif_(choice == key)
        branch = case.then(task(**inputs))
    return branch.else_().fail(
        f"{name}: the plan names a shape that was not registered; register again after shapes.yaml changed"
    )


def each_on(name: str, choice: Any, tasks: dict[str, Any], over: dict[str, Any], **inputs: Any) -> Any:
    """Like `on`, with the task mapped over the one list in `over`: a pod for each item, none for an empty list."""
    return on(name, choice, {key: map_task(partial(task, **inputs)) for key, task in tasks.items()}, **over)
