"""Report on an execution that has not succeeded: its failure, checkpoints, decks and stored artifacts."""

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flytune.addresses import reason, redact
from flytune.cluster import control_plane, executions
from flytune.cluster.control_plane import ControlPlane
from flytune.cluster.executions import Execution
from flytune.errors import ExportError, RecipeError
from flytune.files import new_output
from flytune.recipe import Recipe

REPORT = "tasks.report.report_failure"
"""The task that reports a failure, in its deck."""
TEXT = "failure.txt"
_PRE = re.compile(r"<pre>(.*?)</pre>", re.DOTALL)


def fetch_report(execution: Execution, out: Path) -> list[str]:
    """Write the report of an execution's failure and the decks of its tasks to the new folder `out`; return
    the files' names.

    Raises:
        ExportError: flyteadmin does not know the execution, or it has not failed.
        StorageError: the disk is full.
    """
    with control_plane.connected(execution) as plane:
        phase, closure = plane.closure(execution.identifier)
        if phase not in executions.FAILED:
            raise ExportError(
                f"{execution}: the execution is {phase}, and has not failed; leave out --failed"
            )
        nodes = list(plane.nodes(execution.identifier))
        lines = [f"{execution}: {phase}"]
        reports: list[str] = []
        decks: dict[str, str] = {}
        for node, tasks in nodes:
            if not node.closure.deck_uri:
                continue
            task = tasks[-1].rpartition(".")[2] if tasks else "deck"
            name = re.sub(r"[^\w.-]", "-", f"{node.id.node_id}-{task}.html")
            try:
                decks[name] = plane.content(node.closure.deck_uri).decode(errors="replace")
            except OSError as error:
                lines.append(f"{name}: cannot be read: {reason(error)}")
                continue
            if REPORT in tasks:
                reports += map(html.unescape, _PRE.findall(decks[name]))
        lines += reports or [*_errors(closure), _checkpoints(plane, execution, nodes)]
        lines += [
            f"stored before: flyte://v1/{path}/o" for path, _ in executions.stored_artifacts(plane, nodes)
        ]
    with new_output(out) as folder:
        folder.mkdir()
        (folder / TEXT).write_text(redact("\n".join(lines)) + "\n", encoding="utf-8")
        for name, page in decks.items():
            (folder / name).write_text(page, encoding="utf-8")
    return [TEXT, *decks]


def _errors(closure: Any) -> list[str]:
    """Return the error of an execution without a report, and the reason why it was aborted."""
    messages = [closure.error.message] if closure.error is not None else []
    if closure.abort_metadata is not None:
        messages.append(
            f"aborted by {closure.abort_metadata.principal or 'somebody'}: {closure.abort_metadata.cause}"
        )
    return messages


def _checkpoints(plane: ControlPlane, execution: Execution, nodes: list[tuple[Any, list[str]]]) -> str:
    """Return a sentence on the address of a recipe's checkpoints, by the recipe and the addresses that tasks
    wrote to."""
    inputs = plane.client.get_execution_data(execution.identifier).full_inputs.literals
    records = executions.records({"recipe": inputs["recipe"]} if "recipe" in inputs else {})

    def shared() -> str | None:
        location = _location(plane, execution.name, nodes)
        return None if location is None else f"{location}/flytune-checkpoints"

    return checkpoints(records.get("recipe"), shared)


def checkpoints(recipe: Any, shared: Callable[[], str | None]) -> str:
    """Return a sentence on the address of a run's checkpoints.

    Args:
        recipe: content of the run's recipe; None if it has none.
        shared: function that returns the address for recipes that name no folder; None if the run has stored
            nothing.
    """
    try:
        read = Recipe.model_validate(recipe)
    except RecipeError:
        return "checkpoints: the execution has no recipe of its own"
    settings = read.checkpoints
    if not settings.save_steps:
        return "checkpoints: none are written (checkpoints.save_steps is not set)"
    where = shared() if settings.folder is None else settings.folder
    if where is None:
        return "checkpoints: none, because no task has stored anything"
    names = settings.name or f"{read.name}-..."
    return (
        f"checkpoints: {where}/{names}, if training has saved any; the same recipe resumes from the "
        "newest complete one"
    )


def _location(plane: ControlPlane, execution: str, nodes: list[tuple[Any, list[str]]]) -> str | None:
    """Return the cluster's raw output location, from an address LOCATION/SHARD/EXECUTION-NODE-ATTEMPT/... of
    an output."""
    pattern = re.compile(rf"(.+://.+)/[^/]+/{re.escape(execution)}-[^/]+(?:/.*)?")
    for node, _ in nodes:
        for literal in plane.client.get_node_execution_data(node.id).full_outputs.literals.values():
            blob = literal.scalar.blob if literal.scalar is not None else None
            match = pattern.fullmatch(blob.uri) if blob is not None else None
            if match:
                return match[1]
    return None
