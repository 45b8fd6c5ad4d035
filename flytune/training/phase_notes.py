"""Notes on the phases of a run for its next attempt: the only report of a pod that is killed for its memory.

Each node keeps one note, at the address of the run's checkpoints, and rewrites it at each phase and while its memory grows.
An attempt stops whose two predecessors were killed in the same phase, with no step saved in between.
"""

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flytune import json_core
from flytune.errors import KilledAgain
from flytune.failures import Failure, kind_of, reports, task_name
from flytune.failures.table import KINDS
from flytune.hardware.pod_memory import memory
from flytune.pods import spec
from flytune.records import Plan
from flytune.records.plan import LOAD
from flytune.schema import Record
from flytune.training import attempt_notes

log = logging.getLogger(__name__)

POINTER = "phase-note"
"""File in reports.FOLDER that names the node's note, for the process that started the ranks and knows how they ended."""
SIGTERM = "SIGTERM"
SECONDS = 1.0
"""Interval in seconds at which the memory is measured."""
PARTS = 16
"""Number of parts of the allowed memory; a note is rewritten whenever the memory has grown by one part."""
LONGEST = 300
"""Most characters of an attempt's reason."""
WAIT = 5.0
"""Longest time in seconds that a phase waits for its note: a storage that is unavailable must not delay a run."""
_KILLED = "out of host memory"
_SILENT = {None, _KILLED, *(kind.name for kind in KINDS if kind.notices)}
"""Ends of the nodes of an attempt of which one was killed: without a report, or by losing a peer."""


class PhaseNote(Record):
    """The last phase of one node in one attempt."""

    execution: str
    attempt: int
    node: int
    task: str
    phase: str
    used_bytes: int
    allowed_bytes: int
    saved_step: int
    """Step of the newest checkpoint when the attempt began."""
    counted_bytes: int | None = None
    """Host memory of the phase in the plan, in bytes; None where the plan has none."""
    ended: str | None = None
    """Kind of the failure (flytune.failures.table), or SIGTERM; None while the node runs, and once it was killed."""
    reason: str = ""
    """The failure in one line; empty while the node runs, and once it was killed."""
    signalled: float | None = None
    """Time of a SIGTERM, in seconds since 1970."""
    host: str = ""
    """Name of the node in Kubernetes."""

    @property
    def file(self) -> str:
        return f"phase-{self.execution}-{self.attempt}-{self.node}.json"

    @property
    def was_killed(self) -> bool:
        return self.ended in (None, _KILLED)

    @property
    def memory(self) -> str:
        """Used and allowed memory as a phrase."""
        return f"{self.used_bytes / 2**30:.1f} of {self.allowed_bytes / 2**30:.1f} GiB of the pod's memory"

    def __str__(self) -> str:
        return f"{self.task}, attempt {self.attempt + 1}, {self.phase}: {self.memory}"


class PhaseNotes:
    """Keeper of this node's note from the beginning of an attempt to its end. Outside of Flyte, no note is kept."""

    def __init__(self, address: str, plan: Plan | None = None, is_signalled: Callable[[], bool] = lambda: False) -> None:
        self._address, self._plan, self._is_signalled = address, plan, is_signalled
        self._note = PhaseNote(
            execution=os.environ.get("FLYTE_INTERNAL_EXECUTION_ID", ""),
            attempt=spec.attempts_before(),
            node=int(os.environ.get("GROUP_RANK", "0")),
            task=task_name(),
            phase="",
            used_bytes=0,
            allowed_bytes=1,
            saved_step=0,
            host=host(),
        )
        self._is_kept = bool(self._note.execution) and os.environ.get("LOCAL_RANK", "0") == "0"
        self._changed, self._written, self._over = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.Lock()
        """Lock of the note itself: phases begin in the main thread."""
        self._thread = threading.Thread(target=self._keep, name="phase notes", daemon=True)

    @contextmanager
    def attempt(self, saved_step: Callable[[], int] = lambda: 0, phase: str = LOAD) -> Iterator[None]:
        """Keep the note during the block, from `phase` on; `saved_step` returns the step of the newest checkpoint.

        Raises:
            KilledAgain: the last two attempts were killed in the same phase, and no step was saved in between.
        """
        if not self._is_kept:
            yield
            return
        try:
            self._begin(phase, saved_step())
            yield
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)

    def _begin(self, phase: str, saved_step: int) -> None:
        self._note = self._note.model_copy(update={"saved_step": saved_step, "phase": phase})
        _kept.append(self._address)
        point(POINTER, self._address, self._note.file)
        self._check()
        self._thread.start()
        self.enter(phase)

    def enter(self, phase: str) -> None:
        """Begin a phase; its note is written when this returns, unless the storage is unavailable."""
        if not self._thread.is_alive():
            return
        counted = _counted(self._plan, phase) if self._plan else None
        with self._lock:
            self._note = self._note.model_copy(update={"phase": phase, "used_bytes": 0, "counted_bytes": counted})
        self.write_now()

    def write_now(self) -> None:
        """Write the note as it is now, and wait until it is written, unless the storage is unavailable."""
        self._written.clear()
        self._changed.set()
        self._written.wait(WAIT)

    def _end(self, error: BaseException | None) -> None:
        """Note that the attempt has failed; where it has not, delete the notes of this node's attempts."""
        self._over.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(WAIT)
        if error is not None:
            ended = {"ended": kind_of(error).name, "reason": reason_of(error), "signalled": self._signal_time()}
            _write(self._address, self._note.model_copy(update=ended))
        else:
            clear(self._address, self._note.execution, self._note.node)

    def _keep(self) -> None:
        while not self._over.is_set():
            self._changed.wait(SECONDS)
            is_new = self._changed.is_set()
            self._changed.clear()
            used, allowed = memory()
            with self._lock:
                signalled = self._signal_time()
                ended = SIGTERM if signalled else None
                is_due = is_new or ended != self._note.ended or used - self._note.used_bytes >= allowed / PARTS
                if is_due:
                    measured = {"used_bytes": used, "allowed_bytes": allowed, "ended": ended, "signalled": signalled}
                    self._note = note = self._note.model_copy(update=measured)
            if is_due and not self._over.is_set():
                _write(self._address, note)
                if is_new:
                    self._written.set()

    def _signal_time(self) -> float | None:
        return (self._note.signalled or time.time()) if self._is_signalled() else None

    def _check(self) -> None:
        mine = self._note
        earlier = read(self._address, mine.execution)
        last, before = ([note for note in earlier if note.attempt == mine.attempt - back] for back in (1, 2))
        if not (_is_silent(last) and _is_silent(before)):
            return
        for first in before:
            for second in last:
                is_alike = first.was_killed and second.was_killed and first.phase == second.phase
                if is_alike and first.saved_step == second.saved_step == mine.saved_step:
                    raise KilledAgain(_sentence(first, second, self._address))


def _is_silent(attempt: list[PhaseNote]) -> bool:
    return {note.ended for note in attempt} <= _SILENT


def _sentence(first: PhaseNote, second: PhaseNote, address: str) -> str:
    gib = [f"{size / 2**30:.1f}" for size in (first.used_bytes, second.used_bytes, second.allowed_bytes)]
    counted = second.counted_bytes
    plan = "the plan has no figure for it" if counted is None else f"the plan had {counted / 2**30:.1f} GiB"
    return (
        f"attempts {first.attempt + 1} and {second.attempt + 1} were killed without a report in the same phase, "
        f"{second.phase}, at {gib[0]} and {gib[1]} of the {gib[2]} GiB of memory that the pod may take ({plan}); no step was "
        "saved in between, and this attempt would end there too: the run does not continue by itself. Checkpoints are at "
        f"{address}"
    )


def _counted(plan: Plan, phase: str) -> int | None:
    """Return the plan's bytes of host memory of a node in a phase."""
    for need in plan.needs:
        if phase in need.phases and need.resource in ("host memory", "process memory"):
            processes = plan.processes if need.resource == "process memory" else 1
            return processes * sum(need.phases[phase].values())
    return None


def read(address: str, execution: str = "") -> list[PhaseNote]:
    """Read the notes at an address, of one execution or of all: the latest attempt first, and in it killed nodes first."""
    found: list[PhaseNote] = []
    try:
        names = [
            name for name in attempt_notes.names(address) if name.startswith(f"phase-{execution}") and name.endswith(".json")
        ]
        found = [PhaseNote.parse(attempt_notes.content(address, name) or b"") for name in names]
    except Exception as error:  # noqa: BLE001 (each file system has errors of its own; a note is no reason to lose a run)
        log.warning("%s: the notes on phases could not be read: %s", address, error)
    mine = [note for note in found if execution in ("", note.execution)]
    return sorted(mine, key=lambda note: (note.attempt, note.was_killed), reverse=True)


def clear(address: str, execution: str = "", node: int | None = None) -> None:
    """Delete notes: all, or those of one execution or node."""
    for note in read(address, execution):
        if node in (None, note.node):
            attempt_notes.remove(address, note.file)


def correct(folder: Path, cause: Failure) -> None:
    """Write the cause into the note of a node's ranks, whose failures are reported in `folder`."""
    if (found := pointed(folder, POINTER)) is None:
        return
    address, file = found
    _kept.append(address)
    try:
        note = PhaseNote.parse(attempt_notes.content(address, file) or b"")
    except Exception as error:  # noqa: BLE001 (the failure itself must not be lost for it)
        log.warning("%s: the note on the last phase was not corrected: %s", address, error)
        return
    _write(address, note.model_copy(update={"ended": cause.kind, "reason": one_line(cause.sentence)}))


_kept: list[str] = []
"""Addresses of the notes of this process, or of the ranks that it has started."""


def kept_at() -> str:
    """Return the address of the notes of this process, or of the ranks that it started; empty if none are kept."""
    return _kept[-1] if _kept else ""


def host() -> str:
    """Return the name of this node in Kubernetes, or elsewhere of this machine."""
    return os.environ.get(spec.NODE) or socket.gethostname()


def reason_of(error: BaseException) -> str:
    """Return the reason of an attempt that ends with an error, in one line."""
    # A local run leaves with the exit code of a shell's command that SIGINT has ended.
    if isinstance(error, KeyboardInterrupt) or getattr(error, "code", None) == 128 + signal.SIGINT:
        return "ended by Ctrl-C"
    if not isinstance(error, Exception):
        return f"ended by {type(error).__name__}"
    return one_line(reports.of_error(error, rank=int(os.environ.get("RANK", "0"))).sentence)


def one_line(text: str) -> str:
    """Return the first line of a reason, cut at its end."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 4]} ..."


def point(name: str, address: str, file: str) -> None:
    """Name a file at an address to the process that has started the ranks, and knows how they end."""
    if folder := os.environ.get(reports.FOLDER):
        (Path(folder) / name).write_text(json.dumps({"place": address, "file": file}), encoding="utf-8")


def pointed(folder: Path, name: str) -> tuple[str, str] | None:
    """Return the address and the name of such a file; None where there is none."""
    if not (pointer := folder / name).exists():
        return None
    found = json_core.load_object(pointer.read_bytes())
    return found["place"], found["file"]


def _write(address: str, note: PhaseNote) -> None:
    try:
        attempt_notes.put(address, note.file, note.model_dump_json(indent=2).encode())
    except Exception as error:  # noqa: BLE001 (each file system has errors of its own; a note is no reason to lose a run)
        log.warning("%s: a note on phase %s could not be written: %s", address, note.phase, error)
