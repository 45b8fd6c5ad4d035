"""Records of a run's attempts, stored with the checkpoints: what the run has taken, lost attempts included."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flytune.console.step_lines import show
from flytune.errors import StorageError
from flytune.failures import Failure
from flytune.hardware import Shape
from flytune.pods import spec
from flytune.records import Attempt, Plan, Step
from flytune.schema import RecordError
from flytune.storage import Storage
from flytune.training import attempt_notes, earlier_attempts, phase_notes
from flytune.training.memory_peaks import Peaks

log = logging.getLogger(__name__)

POINTER = "attempt-record"
"""File in reports.FOLDER that names the attempt's record, for the process that started the ranks."""
SHARE = 0.05
"""Largest share of the time in which a record is being written."""
PAUSE = 10.0
"""Shortest time in seconds between two writes to an object store."""
WAIT = 5.0
"""Longest time in seconds that the end of an attempt waits for its record: an unavailable storage must not delay it."""


class AttemptRecords:
    """Keeper of this attempt's record, rewritten while it runs: a killed attempt leaves its last one.

    They are kept where another attempt may follow: with checkpoints, or in an execution of Flyte, which retries.
    """

    def __init__(self, address: str, plan: Plan, shape: Shape, peaks: Peaks, *, has_checkpoints: bool) -> None:
        """Begin the attempt: its machines are held from now on."""
        self._address, self._peaks, self._has_checkpoints = address, peaks, has_checkpoints
        self._began = self._loop_began = time.monotonic()
        self._loop_seconds: float | None = 0.0
        execution = os.environ.get("FLYTE_INTERNAL_EXECUTION_ID", "")
        self._mine = Attempt(
            number=1,
            execution=execution,
            retry=spec.attempts_before(),
            host=phase_notes.host(),
            resumed_from_step=0,
            last_step=0,
            shape=shape.name,
            world_size=plan.world_size,
            per_device_train_batch_size=plan.per_device_train_batch_size,
            gradient_accumulation_steps=plan.gradient_accumulation_steps,
            price_per_hour=shape.total_price_per_hour,
            seconds=0.0,
            held_seconds=0.0,
        )
        self._is_kept = has_checkpoints or bool(execution)
        self._file = ""
        self._before: list[Attempt] = []
        self._changed, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="attempt record", daemon=True)

    @contextmanager
    def keeping(self, saved_step: Callable[[], int], *, is_kept: bool) -> Iterator[None]:
        """Keep the record from now on, in the first process; write the last one at the end of the block, however it ends.

        Args:
            saved_step: returns the step of the newest checkpoint.
            is_kept: False if the record is for this attempt alone.
        """
        self._is_kept = self._is_kept and os.environ.get("RANK", "0") == "0"
        if self._is_kept:
            self._before = read(self._address)
            number, step = 1 + max((one.number for one in self._before), default=0), self._step(saved_step)
            start = {"number": number, "resumed_from_step": step, "last_step": step}
            self._mine, self._file = self._mine.model_copy(update=start), f"{_PREFIX}{number:04}-{secrets.token_hex(4)}.json"
            if is_kept:
                phase_notes.point(POINTER, self._address, self._file)
                self._thread.start()
                self._changed.set()
        try:
            yield
        except BaseException as error:
            ended = f"{phase_notes.reason_of(error)}, node {self._mine.host}"
            self._mine = self._mine.model_copy(update={"ended": ended})
            raise
        finally:
            self._over.set()
            self._changed.set()
            if self._thread.is_alive():
                self._thread.join(WAIT)

    def resume(self, args: Any, step: int) -> None:
        """Note the batches and the step that the attempt resumes from; the first process prints it, and how others ended."""
        layout = {name: getattr(args, name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")}
        steps = {"resumed_from_step": step, "last_step": step, "world_size": args.world_size}
        self._mine = self._mine.model_copy(update=layout | steps)
        self._changed.set()
        if args.process_index == 0 and (step or self._mine.retry or self._own()):
            start = f"resumes at step {step} from {self._address}" if step else "starts at the beginning"
            retries = os.environ.get(spec.RETRIES)
            name = f"{self._mine.name} of {int(retries) + 1}" if retries and self._mine.execution else self._mine.name
            show("; ".join([f"{name}: {start}", *self._ends()]))

    def _ends(self) -> list[str]:
        """Return a phrase on the end of each earlier attempt: those of this execution last, by Flyte's numbers."""
        mine, own = self._mine, self._own()
        if not mine.execution:
            return [f"{one.name}: {one.ended}" for one in own]
        others = [f"{one.name} of execution {one.execution}: {one.ended}" for one in own if one.execution != mine.execution]
        return others + earlier_attempts.lines(self._address, mine.execution, before=mine.retry)

    def _own(self) -> list[Attempt]:
        """Return the earlier attempts that count: without checkpoints, another execution's are of another run."""
        return [one for one in self._before if self._has_checkpoints or one.execution == self._mine.execution]

    def begin_steps(self) -> None:
        """Begin the training loop."""
        self._loop_began, self._loop_seconds = time.monotonic(), None

    def end_step(self, step: int) -> None:
        """Note that a step was trained."""
        self._mine = self._mine.model_copy(update={"last_step": step})
        self._changed.set()

    def end_steps(self) -> None:
        """End the training loop."""
        self._loop_seconds = time.monotonic() - self._loop_began

    def now(self) -> Attempt:
        """Return the record as it is now, with the peaks of this process."""
        now = time.monotonic()
        seconds = now - self._loop_began if self._loop_seconds is None else self._loop_seconds
        peaks = {"peaks": dict(self._peaks.bytes), "reserved_peaks": dict(self._peaks.reserved)}
        return self._mine.model_copy(update={"seconds": seconds, "held_seconds": now - self._began, **peaks})

    def earlier(self, steps: Sequence[Step], held_seconds: float) -> list[Attempt]:
        """Return the attempts before this one; the first process calls it.

        What the resumed checkpoint is known to have taken is counted even where no record of it is left: the seconds of its
        logged `steps`, and `held_seconds` of machines.
        """
        if self._file:
            self._before = [one for one in read(self._address) if one.number < self._mine.number]
        return _covering(self._own(), self._mine, steps, held_seconds)

    def _step(self, saved_step: Callable[[], int]) -> int:
        try:
            return saved_step()
        except StorageError:  # all processes stop for it together, once there is a process group
            return 0

    def _keep(self) -> None:
        is_local, is_over = Storage(self._address).is_local, False
        while not is_over:
            self._changed.wait()
            self._changed.clear()
            is_over, began = self._over.is_set(), time.monotonic()
            try:
                attempt_notes.put(self._address, self._file, self.now().model_dump_json(indent=2).encode())
            except Exception as error:  # noqa: BLE001 (each file system has errors of its own; a record is no reason to lose a run)
                log.debug("%s: the attempt's record could not be written: %s", self._address, error)
            took = time.monotonic() - began
            self._over.wait(max(took / SHARE, 0.0 if is_local else PAUSE))


_PREFIX = "record-"


def correct(folder: Path, cause: Failure) -> None:
    """Write the cause into the record of an attempt whose ranks report their failures in `folder`."""
    if cause.notices or (found := phase_notes.pointed(folder, POINTER)) is None:
        return
    address, file = found
    try:
        record = Attempt.parse(attempt_notes.content(address, file) or b"")
        ended = f"{phase_notes.one_line(cause.sentence)}, node {record.host}"
        attempt_notes.put(address, file, record.model_copy(update={"ended": ended}).model_dump_json(indent=2).encode())
    except Exception as error:  # noqa: BLE001 (the failure itself must not be lost for it)
        log.warning("%s: the attempt's record was not corrected: %s", address, error)


def _covering(found: Sequence[Attempt], mine: Attempt, steps: Sequence[Step], held_seconds: float) -> list[Attempt]:
    """Return the records with what is known from the attempts after them: a killed process's record is late.

    Each has trained up to the step that the next one, or `mine`, resumed from, and has taken the seconds of its logged `steps`;
    the last one that has trained held its machines for what is left of `held_seconds`.
    """
    if not mine.resumed_from_step:
        return list(found)
    unknown = {"number": 0, "resumed_from_step": 0, "last_step": 0, "seconds": 0.0, "ended": earlier_attempts.UNKNOWN}
    found, last = list(found) or [mine.model_copy(update=unknown)], 0
    for index, following in enumerate((*found[1:], mine)):
        # A record at step 0 after others is of an attempt that could not read the checkpoints, and has trained nothing.
        last = index if found[index].last_step else last
        step = max(found[last].last_step, following.resumed_from_step)
        found[last] = found[last].model_copy(update={"last_step": step})
    for index, one in enumerate(found):
        end = min(one.last_step, *(other.resumed_from_step for other in (*found[index + 1 :], mine) if other.last_step))
        seconds = max(one.seconds, sum(step.seconds for step in steps if one.resumed_from_step < step.step <= end))
        found[index] = one.model_copy(update={"seconds": seconds, "held_seconds": max(one.held_seconds, seconds)})
    left = held_seconds - sum(one.held_seconds for index, one in enumerate(found) if index != last)
    found[last] = found[last].model_copy(update={"held_seconds": max(found[last].held_seconds, left)})
    return found


def read(address: str) -> list[Attempt]:
    """Return the records at an address with the reasons of their ends, in their order; none where they cannot be read."""
    found: list[Attempt] = []
    try:
        found.extend(Attempt.parse(attempt_notes.content(address, name) or b"") for name in _names(address))
    except RecordError as error:
        log.warning("%s: a record of an attempt is damaged: %s", address, error)
    except Exception as error:  # noqa: BLE001 (each file system has errors of its own; a record is no reason to lose a run)
        log.warning("%s: the records of earlier attempts could not be read: %s", address, error)
    reasons = earlier_attempts.reasons(address) if any(one.execution for one in found) else {}
    ends = [reasons.get((one.execution, one.retry)) or one.ended or earlier_attempts.UNKNOWN for one in found]
    found = [one.model_copy(update={"ended": ended}) for one, ended in zip(found, ends, strict=True)]
    return sorted(found, key=lambda one: one.number)


def clear(address: str) -> None:
    """Delete all records."""
    for name in _names(address):
        attempt_notes.remove(address, name)


def _names(address: str) -> list[str]:
    return [name for name in attempt_notes.names(address) if name.startswith(_PREFIX) and name.endswith(".json")]
