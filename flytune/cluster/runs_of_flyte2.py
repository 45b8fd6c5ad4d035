"""Results of a run of Flyte 2, or the report of its failure, through the SDK.

Flyte 2 signs no addresses of results: their files are read with this machine's own access to the storage.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from flytune.cluster import failed_runs, flyte2_sdk
from flytune.cluster.executions import FAILED, Execution, ExecutionResult
from flytune.errors import ExportError
from flytune.files import new_output
from flytune.sentences import counted

_CONSOLE = re.compile(
    r"https?://.*/v2/domain/(?P<domain>[^/]+)/project/(?P<project>[^/]+)/runs/(?P<name>[^/?#]+)"
)
_ROOT = "a0"
"""Name of a run's first action."""
_STORE = ".store_artifact"
"""End of the name of the task whose output is the artifact."""
TEXT = "failure.txt"
POLL_SECONDS = 5.0
"""Time between two questions about a run that goes on."""
_MOST_FAILURES = 120
"""Questions without an answer after which a run is not followed any more: ten minutes."""


def parse(text: str) -> Execution | None:
    """Return the run of an address of Flyte 2's console; None for any other address."""
    match = _CONSOLE.match(text.strip())
    return Execution(**match.groupdict()) if match else None


def find(config: Path, run: Execution) -> ExecutionResult:
    """Return the folder or the records that a run has returned.

    Raises:
        ExportError: the control plane does not know it, or it has returned nothing.
    """
    with flyte2_sdk.connected(config, run):
        from flyte.remote import ActionDetails
        from flyte.syncify import syncify

        details = ActionDetails.get(run_name=run.name, name=_ROOT)
        phase = details.phase.name
        literals = syncify(details.output_literals)() if phase == "SUCCEEDED" else {}
        folders = [
            literal.scalar.blob.uri for literal in literals.values() if literal.scalar.HasField("blob")
        ]
        records = {name: literal for name, literal in literals.items() if literal.scalar.HasField("binary")}
        left = [] if phase == "SUCCEEDED" else _left(run)
    if folders:
        return ExecutionResult(folders[0].rstrip("/"))
    if records:
        return ExecutionResult(records={name: _unpacked(record) for name, record in records.items()})
    texts = [
        literal.scalar.primitive.string_value
        for literal in literals.values()
        if literal.scalar.HasField("primitive")
    ]
    if texts:
        raise ExportError(f"{run}: the run is {phase}, and has stored no files; it says: {'; '.join(texts)}")
    todo = "; --failed fetches the report of the failure" * (phase in FAILED)
    nothing = f"{run}: the run is {phase}, and returns nothing{' yet' * (phase not in FAILED)}{todo}"
    raise ExportError("\n  ".join([nothing, *left]))


class RunEnd(NamedTuple):
    """End of a run."""

    is_success: bool
    text: str
    """Phase of the run, and the error that ended it."""


def is_known(config: Path, run: Execution) -> bool:
    """Return whether the control plane knows a run, or does not answer; False if it says that there is
    none."""
    try:
        with flyte2_sdk.connected(config, run):
            from flyte.remote import ActionDetails

            ActionDetails.get(run_name=run.name, name=_ROOT)
    except ExportError as error:
        return "NOT_FOUND" not in str(error)
    return True


def follow(config: Path, run: Execution, show: Callable[[str], None]) -> RunEnd:
    """Show each change of a run's actions until the run has ended.

    The control plane is asked again and again: streams of the open backend end after half a minute.

    Raises:
        ExportError: it has not answered _MOST_FAILURES times in a row.
    """
    phases, failures = dict[str, str](), 0
    while True:
        try:
            with flyte2_sdk.connected(config, run):
                outcome = _changes(run, phases, show)
            failures = 0
        except ExportError as error:
            failures, outcome = failures + 1, None
            if failures == _MOST_FAILURES:
                raise
            if failures == 1:
                show(f"{error}; asked again, the run goes on by itself")
        if outcome is not None:
            return outcome
        time.sleep(POLL_SECONDS)


def _changes(run: Execution, phases: dict[str, str], show: Callable[[str], None]) -> RunEnd | None:
    """Show the actions whose phases are not those of `phases`, and note them there; return how the run has
    ended."""
    from flyte.remote import Action, ActionDetails

    for action in Action.listall(for_run_name=run.name):
        phase = action.phase.name
        if action.name != _ROOT and phases.get(action.name) != phase:
            phases[action.name] = phase
            show(f"{(action.task_name or action.name).rpartition('.')[2]}: {phase.lower()}")
    root = ActionDetails.get(run_name=run.name, name=_ROOT)
    phase = root.phase.name
    if phase not in {"SUCCEEDED", *FAILED}:
        return None
    error = root.error_message if phase in FAILED else ""
    return RunEnd(phase == "SUCCEEDED", f"{phase.lower()}: {error}" if error else phase.lower())


def _left(run: Execution) -> list[str]:
    """Return lines on what a run that has not succeeded has stored: its artifacts, and the address of its
    checkpoints."""
    from flyte.remote import Action, ActionDetails
    from flyte.syncify import syncify

    root = ActionDetails.get(run_name=run.name, name=_ROOT)
    recipe, stored, addresses = syncify(root.input_literals)().get("recipe"), list[str](), list[str]()
    for action in Action.listall(for_run_name=run.name):
        if action.name == _ROOT or action.phase.name != "SUCCEEDED":
            continue
        details = ActionDetails.get(run_name=run.name, name=action.name)
        outputs = [place.scalar.blob.uri.rstrip("/") for place in syncify(details.output_literals)().values()]
        addresses += filter(None, outputs)
        stored += filter(None, outputs if (details.task_name or "").endswith(_STORE) else [])
    scope = {root.action_id.run.org, run.project, run.domain, run.name}

    def shared() -> str | None:
        return next(filter(None, (_shared(address, scope) for address in addresses)), None)

    checkpoints = failed_runs.checkpoints(_unpacked(recipe) if recipe is not None else None, shared)
    return [*(f"stored before: {place} (flytune fetch {place} OUT)" for place in stored), checkpoints]


def _shared(address: str, scope: set[str]) -> str | None:
    """Return where runs share checkpoints, from an address BUCKET/SHARD/SHARED/PROJECT/DOMAIN/RUN/... of an
    output."""
    scheme, _, path = address.partition("://")
    bucket, *parts = path.split("/")
    start = next((at for at, part in enumerate(parts) if part in scope), 0)
    # Each action has a first folder of its own, which the base of the run lacks.
    return f"{scheme}://{'/'.join([bucket, *parts[1:start]])}/flytune-checkpoints" if start else None


def _unpacked(literal: Any) -> Any:
    import msgpack

    return msgpack.unpackb(literal.scalar.binary.value, strict_map_key=False)


def fetch_report(config: Path, run: Execution, out: Path) -> list[str]:
    """Write the errors of a failed run's actions and their reports to the new folder `out`; return the files'
    names.

    Raises:
        ExportError: the control plane does not know the run, or it has not failed.
    """
    with flyte2_sdk.connected(config, run):
        from flyte.remote import Action, ActionDetails

        phase = ActionDetails.get(run_name=run.name, name=_ROOT).phase.name
        if phase not in FAILED:
            raise ExportError(f"{run}: the run is {phase}, and has not failed; leave out --failed")
        lines, reports = [f"{run}: {phase}"], dict[str, str]()
        for action in Action.listall(for_run_name=run.name):
            details = ActionDetails.get(run_name=run.name, name=action.name)
            task = (details.task_name or action.name).rpartition(".")[2]
            if details.phase.name in FAILED and action.name != _ROOT:
                lines += [
                    "",
                    f"{task}, {details.phase.name}, {counted(details.attempts, 'attempt')}:",
                    details.error_message,
                ]
            if (page := _report(action)) is not None:
                reports[f"{task}-{action.name}.html"] = page
        lines += ["", *_left(run)]
    with new_output(out) as folder:
        folder.mkdir()
        (folder / TEXT).write_text("\n".join(lines) + "\n", encoding="utf-8")
        for name, page in reports.items():
            (folder / name).write_text(page, encoding="utf-8")
        return sorted(file.name for file in folder.iterdir())


def _report(action: Any) -> str | None:
    """Return the report of an action's last attempt; None if it has none."""
    try:
        return str(action.get_report())
    except Exception:  # noqa: BLE001 (most tasks have no report, and each backend says so in its own way)
        return None
