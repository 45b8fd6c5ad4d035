"""Reasons for which earlier attempts ended, from the notes of their nodes."""

import math
from collections.abc import Sequence

from flytune.failures.table import KINDS
from flytune.training import phase_notes
from flytune.training.phase_notes import SIGTERM, PhaseNote

UNKNOWN = "it left no report"
_NOTICES = {kind.name for kind in KINDS if kind.notices}


def reasons(address: str, execution: str = "") -> dict[tuple[str, int], str]:
    """Return the reason of each attempt that has left notes at an address, by its execution and Flyte's number, from 0 on."""
    found: dict[tuple[str, int], list[PhaseNote]] = {}
    for note in phase_notes.read(address, execution):
        found.setdefault((note.execution, note.attempt), []).append(note)
    return {attempt: _cause(found[attempt]) for attempt in sorted(found)}


def lines(address: str, execution: str, before: int | None = None) -> list[str]:
    """Return a line for each attempt of an execution, `attempt 1: REASON, node NAME`.

    Args:
        before: Flyte's number of the attempt that comes after the last one to name; None to name all that left notes.
    """
    found = reasons(address, execution)
    numbers = range(1 + max((number for _, number in found), default=-1) if before is None else before)
    return [f"attempt {number + 1}: {found.get((execution, number), UNKNOWN)}" for number in numbers]


def _cause(notes: Sequence[PhaseNote]) -> str:
    """Return the reason of the node that ended first, with the node's name."""
    note = min(notes, key=_place)
    if note.reason:
        said = note.reason
    elif note.signalled is not None:
        said = f"preempted: {SIGTERM} in the phase {note.phase}; the pod ended before it could say what it had saved"
    else:
        said = f"{note.ended or 'killed without a report'}: {note.phase}, {note.memory}"
    return f"{said}, node {note.host or note.node}"


def _place(note: PhaseNote) -> tuple[int, float]:
    """Return the order in which nodes explain the end: errors, kills, signals by their time, consequences of others' ends."""
    if note.ended in _NOTICES:
        return 4, 0.0
    if note.signalled is not None:
        return 2, note.signalled
    if note.ended is None:
        return 1, 0.0
    return (3, math.inf) if note.ended == "preempted" else (0, 0.0)
