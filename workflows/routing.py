"""The branch that a plan's choice of machines takes."""

from typing import Any

from flytekit import conditional


def on(name: str, choice: Any, tasks: dict[str, Any], **inputs: Any) -> Any:
    """Runs the one task whose key equals `choice`, with `inputs`; a Flyte condition over all keys."""
    branch: Any = conditional(name)
    for position, (key, task) in enumerate(tasks.items()):
        case = branch.if_(choice == key) if position == 0 else branch.elif_(choice == key)
        branch = case.then(task(**inputs))
    return branch.else_().fail(
        f"{name}: the plan names a shape that was not registered; register again after shapes.yaml changed"
    )
