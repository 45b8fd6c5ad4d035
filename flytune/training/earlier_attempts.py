"""Records of a run's attempts, beside its checkpoints: why earlier ones ended, and what they have taken."""

import json
import logging
import math
from collections.abc import Sequence

from flytune import files, json_core
from flytune.errors import KilledAgain, TrainingError
from flytune.failures import first_line
from flytune.failures.table import KINDS, OUT_OF_GPU_MEMORY, OUT_OF_HOST_MEMORY
from flytune.records import Attempt, NodeAttempt, Plan, Step
from flytune.records.attempt import DONE, SIGTERM
from flytune.schema import RecordError
from flytune.storage import Storage

PREFIXES = ("record-", "phase-", "notes.json")


def of_release_0_2(name: str, content: bytes) -> str | bytes:
    """Return a file's content as that of a record: figures without a phase, or a phase or notes without
    figures."""
    try:
        fields = json_core.load_object(content)
    except json_core.JSONError:
        return content  # the record refuses it
    if name.startswith("phase-"):
        fields |= {"number": 0, "retry": fields.pop("attempt", None), "kind": fields.pop("ended", None)}
        fields["resumed_from_step"] = fields.pop("saved_step", None)
        fields.pop("counted_bytes", None)
    elif name == "notes.json":
        fields["number"] = 0
        size = fields.pop("per_device_train_batch_size", None)
        if size is not None:
            twice = 2 * size if isinstance(size, int) else size
            fields |= {"kind": OUT_OF_GPU_MEMORY, "per_device_train_batch_size": twice}
    return json.dumps(fields)


log = logging.getLogger(__name__)

PREFIX = "attempt-"
UNKNOWN = "it left no report"
_CONSEQUENCES = {kind.name for kind in KINDS if kind.notices}
_KILLED = {None, OUT_OF_HOST_MEMORY}
_SILENT = _KILLED | _CONSEQUENCES
"""Ends of the nodes of an attempt of which one was killed: without a report, or by losing a peer."""


def names(address: str, retry: bool = False) -> list[str]:
    """List the files of records at an address, those of earlier releases too."""
    files_there = Storage(address, retry=retry).names()
    return [name for name in files_there if name.endswith(".json") and name.startswith((PREFIX, *PREFIXES))]


def stored(address: str, retry: bool = False) -> list[NodeAttempt]:
    """Return the records at an address, in the order of the attempts and their nodes.

    Args:
        retry: whether a storage that is away is waited for.

    Raises:
        TrainingError: one is damaged.
    """
    records = []
    storage = Storage(address, retry=False)
    for name in names(address, retry):
        try:
            content = storage.read(name)
            text = content if name.startswith(PREFIX) else of_release_0_2(name, content)
            records.append(NodeAttempt.parse(text).replaced(file_name=name))
        except FileNotFoundError:  # deleted meanwhile
            continue
        except RecordError as error:
            raise TrainingError(
                f"{address}/{name}: not the record of an earlier attempt: {error}; restore the file, or "
                "delete it: then data that was skipped is read again"
            ) from None
    return sorted(records, key=lambda record: (record.number, record.retry, record.node))


def read(address: str, execution: str | None = None) -> list[NodeAttempt]:
    """Return the records of one execution, or of all; none where they cannot be read: they are no reason to
    lose a run."""
    try:
        return [record for record in stored(address) if execution in (None, record.execution)]
    except Exception as error:  # noqa: BLE001 (each file system has errors of its own)
        log.warning("%s: the records of earlier attempts could not be read: %s", address, error)
        return []


def write(address: str, record: NodeAttempt) -> None:
    """Write or replace a record; a reader sees the old one or the new one."""
    Storage(address, retry=False).write(record.file_name, record.model_dump_json(indent=2).encode())


def clear(address: str) -> None:
    """Delete all records at an address, and what attempts left that were killed while they wrote one."""
    storage = Storage(address, retry=False)
    for name in (*names(address), *filter(files.is_temporary, storage.names())):
        storage.remove(name)


def placed(mine: NodeAttempt, records: Sequence[NodeAttempt]) -> tuple[NodeAttempt, list[NodeAttempt]]:
    """Return the record of an attempt that begins with its number in the run, and the records of those before
    it.

    Flyte counts attempts within an action; an action that Flyte 2's driver starts for the same stage is a
    further attempt.
    """
    execution = [record for record in records if mine.execution and record.execution == mine.execution]
    others = [record.retry + 1 for record in execution if record.action != mine.action]
    mine = mine.replaced(retry=max(others, default=0) + mine.retry)
    same = [record.number for record in execution if record.retry == mine.retry and record.number]
    before = [record for record in records if record not in execution or record.retry != mine.retry]
    last = max((record.number for record in before), default=0)
    return mine.replaced(number=same[0] if same else last + 1), before


def check_kills(mine: NodeAttempt, before: Sequence[NodeAttempt], address: str, plan: Plan | None) -> None:
    """Check that another attempt may end otherwise than the two before it.

    Raises:
        KilledAgain: both were killed in the same phase, and no step was saved in between.
    """
    execution = [record for record in before if record.execution == mine.execution and record.phase]
    first, second = ([record for record in execution if record.retry == mine.retry - back] for back in (2, 1))
    if not all(record.kind in _SILENT for record in (*first, *second)):
        return
    for first_attempt in first:
        for other in second:
            were_killed = (
                first_attempt.kind in _KILLED and other.kind in _KILLED and first_attempt.phase == other.phase
            )
            if (
                were_killed
                and first_attempt.resumed_from_step == other.resumed_from_step == mine.resumed_from_step
            ):
                raise KilledAgain(_killed_again(first_attempt, other, address, plan))


def _killed_again(first: NodeAttempt, second: NodeAttempt, address: str, plan: Plan | None) -> str:
    used, then, allowed = (
        f"{size / 2**30:.1f}" for size in (first.used_bytes, second.used_bytes, second.allowed_bytes)
    )
    counted = plan.host_bytes(second.phase) if plan else None
    planned = (
        "the plan has no figure for it" if counted is None else f"the plan had {counted / 2**30:.1f} GiB"
    )
    return (
        f"attempts {first.retry + 1} and {second.retry + 1} were killed without a report in the same phase, "
        f"{second.phase}, at {used} and {then} of the {allowed} GiB of memory that the pod may take "
        f"({planned}); no step was saved in between, and this attempt would end there too: the run does not "
        f"continue by itself. Checkpoints are at {address}"
    )


def lines(records: Sequence[NodeAttempt], execution: str, before: int | None = None) -> list[str]:
    """Return a line for each attempt of an execution before the one of a number, `attempt 1: REASON, node
    NAME`.

    Without a number, all that have left records are named. The execution of a machine of one's own is empty.
    """
    ends = _ends(records)
    known = sorted(
        number for name, number in ends if name == execution and (before is None or number < before)
    )
    if execution:
        known = list(range(1, before or max(known, default=0) + 1))
    return [f"attempt {number}: {ends.get((execution, number), UNKNOWN)}" for number in known]


def of_run(records: Sequence[NodeAttempt]) -> list[Attempt]:
    """Return the attempts of the run in their order, as training.json has them, with the reasons of their
    ends."""
    ends = _ends(records)
    return [record.figures(ends[record.key]) for record in records if record.is_of_run]


def last_failed(records: Sequence[NodeAttempt]) -> NodeAttempt | None:
    """Return the record of the last attempt, a killed node's first; None if it has succeeded, or there is
    none."""
    last = max((record.retry for record in records if record.phase), default=0)
    nodes = [record for record in records if record.phase and record.retry == last]
    if not nodes or any(record.kind == DONE for record in nodes):
        return None
    return max(nodes, key=was_killed)


def was_killed(record: NodeAttempt) -> bool:
    """Return whether a node was killed."""
    return record.kind in _KILLED


def _ends(records: Sequence[NodeAttempt]) -> dict[tuple[str, int], str]:
    """Return the reason for which each attempt ended, by its key."""
    nodes: dict[tuple[str, int], list[NodeAttempt]] = {}
    for record in records:
        nodes.setdefault(record.key, []).append(record)
    return {key: _cause(of_attempt) for key, of_attempt in nodes.items()}


def _cause(nodes: Sequence[NodeAttempt]) -> str:
    """Return the reason of the node that ended first, with the node's name."""
    known = [record for record in nodes if record.phase]
    if not known:  # figures of an earlier release, which have the reason where there are no phases
        return nodes[0].ended or UNKNOWN
    record = min(known, key=_place)
    if record.reason:
        reason = first_line(record.reason)
    elif record.signalled is not None:
        reason = (
            f"preempted: {SIGTERM} in the phase {record.phase}; the pod ended before it could say what "
            "it had saved"
        )
    elif record.kind == DONE or not record.execution:
        return UNKNOWN
    else:
        reason = f"{record.kind or 'killed without a report'}: {record.phase}, {record.memory}"
    return f"{reason}, node {record.host or record.node}"


def _place(record: NodeAttempt) -> tuple[int, float]:
    """Return the order in which nodes explain the end: errors, kills, signals by their time, consequences of
    others' ends."""
    if record.kind == DONE:
        return 5, 0.0
    if record.kind in _CONSEQUENCES:
        return 4, 0.0
    if record.signalled is not None:
        return 2, record.signalled
    if record.kind is None:
        return 1, 0.0
    return (3, math.inf) if record.kind == "preempted" else (0, 0.0)


def covering(
    earlier: Sequence[Attempt], mine: Attempt, steps: Sequence[Step], held_seconds: float
) -> list[Attempt]:
    """Return the attempts with what is known from those after them: a killed process's record is late.

    Each has trained up to the step that the next one, or `mine`, resumed from, and has taken the seconds of
    its logged `steps`; the last one that has trained held its machines for what is left of `held_seconds`.
    """
    if not mine.resumed_from_step:
        return list(earlier)
    unknown = {"number": 0, "resumed_from_step": 0, "last_step": 0, "seconds": 0.0, "ended": UNKNOWN}
    attempts, last = list(earlier) or [mine.model_copy(update=unknown)], 0
    for index, following in enumerate((*attempts[1:], mine)):
        # A record at step 0 after others is of an attempt that could not read the checkpoints, and has
        # trained nothing.
        last = index if attempts[index].last_step else last
        step = max(attempts[last].last_step, following.resumed_from_step)
        attempts[last] = attempts[last].model_copy(update={"last_step": step})
    for index, attempt in enumerate(attempts):
        later = [other.resumed_from_step for other in (*attempts[index + 1 :], mine) if other.last_step]
        end = min(attempt.last_step, *later)
        logged = sum(step.seconds for step in steps if attempt.resumed_from_step < step.step <= end)
        seconds = max(attempt.seconds, logged)
        held = max(attempt.held_seconds, seconds)
        attempts[index] = attempt.model_copy(update={"seconds": seconds, "held_seconds": held})
    left = held_seconds - sum(attempt.held_seconds for index, attempt in enumerate(attempts) if index != last)
    held = max(attempts[last].held_seconds, left)
    attempts[last] = attempts[last].model_copy(update={"held_seconds": held})
    return attempts
