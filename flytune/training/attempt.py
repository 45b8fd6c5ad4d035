"""Writer of the record of this process's attempt: the only report of a pod that is killed for its memory."""

import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flytune import json_core
from flytune.console.step_lines import show
from flytune.errors import StorageError
from flytune.failures import Failure, FailureText, kind_of, reports, task_name, without_secrets
from flytune.hardware.pod_memory import memory
from flytune.pods import spec
from flytune.records import Attempt, NodeAttempt, Plan, Step
from flytune.records.attempt import DONE, SIGTERM
from flytune.records.plan import LOAD
from flytune.storage import Storage
from flytune.training import earlier_attempts
from flytune.training.measurements import Peaks

log = logging.getLogger(__name__)

POINTER = "attempt"
"""File in reports.FOLDER that names the node's record, for the process that started the ranks and knows how
they ended."""
SECONDS = 1.0
"""Interval in seconds at which the memory is measured, and steps are written into a folder."""
PAUSE = 10.0
"""Interval in seconds at which steps are written to an object store."""
PARTS = 16
"""Number of parts of the allowed memory; the record is rewritten whenever the memory has grown by one
part."""
WAIT = 5.0
"""Longest time in seconds that a phase, or the end, waits for its record: an unavailable storage must not
delay a run."""


class AttemptWriter:
    """Writer of a node's record, in a thread: at once at each phase, signal and the end, while memory grows,
    and for steps.

    It is written where another attempt may follow: in an execution of Flyte by each node, elsewhere by the
    first process of a run that has checkpoints, or that goes on after a failure.
    """

    def __init__(
        self,
        address: str,
        plan: Plan | None = None,
        peaks: Peaks | None = None,
        *,
        is_signalled: Callable[[], bool] = lambda: False,
        has_checkpoints: bool = False,
        goes_on: bool = False,
    ) -> None:
        """Begin the attempt: its machines are held from now on. Only tasks that train have a plan and peaks.

        With `has_checkpoints`, attempts of other executions are of the same run; with `goes_on`, a later
        attempt takes what this one leaves, even without checkpoints.
        """
        self._address, self._plan, self._peaks, self._is_signalled = address, plan, peaks, is_signalled
        self._has_checkpoints, self._goes_on = has_checkpoints, has_checkpoints or goes_on
        self._began = self._loop_began = time.monotonic()
        self._loop_seconds: float | None = 0.0
        self._record = NodeAttempt(
            number=1,
            execution=os.environ.get(spec.EXECUTION, ""),
            action=os.environ.get(spec.ACTION, ""),
            retry=spec.attempts_before(),
            node=int(os.environ.get("GROUP_RANK", "0")),
            host=host(),
            task=task_name(),
        )
        if plan is not None:
            self._record = self._record.replaced(
                shape=plan.shape,
                world_size=plan.world_size,
                per_device_train_batch_size=plan.per_device_train_batch_size,
                gradient_accumulation_steps=plan.gradient_accumulation_steps,
                price_per_hour=plan.price_per_hour,
            )
        self._before: list[NodeAttempt] = []
        self._has_steps = self._is_over = False
        self._is_due, self._is_written = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        """Lock of the record: phases and steps are the main thread's, memory and signals the writing
        one's."""
        self._thread = threading.Thread(target=self._keep, name="attempt record", daemon=True)

    @contextmanager
    def keeping(
        self, saved_step: Callable[[], int] = lambda: 0, phase: str = LOAD, exports_only: bool = False
    ) -> Iterator[None]:
        """Keep the record during the block, from `phase` on, and write how it ended.

        `saved_step` returns the step of the newest checkpoint.

        Raises:
            KilledAgain: the last two attempts were killed in the same phase, and no step was saved in
                between.
        """
        try:
            self._begin(saved_step, phase, exports_only)
            yield
        except BaseException as error:
            self._end(kind_of(error).name, reason_of(error))
            raise
        self._end(DONE)

    def _begin(self, saved_step: Callable[[], int], phase: str, exports_only: bool) -> None:
        in_execution = bool(self._record.execution)
        is_first = os.environ.get("LOCAL_RANK" if in_execution else "RANK", "0") == "0"
        if not is_first or not (in_execution or self._goes_on):
            return
        self._record, self._before = earlier_attempts.placed(
            self._record, earlier_attempts.read(self._address)
        )
        step = _step(saved_step)
        self._update(phase=phase, exports_only=exports_only, resumed_from_step=step, last_step=step)
        if exports_only and not in_execution:
            return
        attempt = f"{self._record.number:04}-{self._record.node}-{secrets.token_hex(4)}"
        name = f"{earlier_attempts.PREFIX}{attempt}.json"
        self._update(file_name=name)
        if folder := os.environ.get(reports.FOLDER):
            (Path(folder) / POINTER).write_text(json.dumps([self._address, name]), encoding="utf-8")
        self._thread.start()
        if in_execution:
            earlier_attempts.check_kills(self._record, self._before, self._address, self._plan)
        self.enter(phase)

    def _end(self, kind: str, reason: str = "") -> None:
        self._update(kind=kind, reason=reason)
        if not self._thread.is_alive():
            return
        self._is_over = True
        self._is_due.set()
        self._thread.join(WAIT)
        _kept[:] = [] if kind == DONE else [(self._address, self.now())]
        if kind == DONE and not self._record.is_of_run:
            for record in earlier_attempts.read(self._address, self._record.execution):
                if record.node == self._record.node:
                    Storage(self._address, retry=False).remove(record.file_name)

    def _update(self, **values: Any) -> None:
        with self._lock:
            self._record = self._record.replaced(**values)

    def enter(self, phase: str) -> None:
        """Begin a phase; its record is written when this returns, unless the storage is unavailable."""
        if self._thread.is_alive():
            self._update(phase=phase, used_bytes=0)
            self.write_now()

    def write_now(self) -> None:
        """Write the record as it is now; in an execution wait until it is written, unless the storage is
        unavailable."""
        self._is_written.clear()
        self._is_due.set()
        if self._record.execution:
            self._is_written.wait(WAIT)

    def resume(self, args: Any, step: int) -> None:
        """Note the batches and the step that the attempt resumes from; the first process prints it, and how
        others ended."""
        layout = {
            name: getattr(args, name)
            for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
        }
        self._update(resumed_from_step=step, last_step=step, world_size=args.world_size, **layout)
        ends = self._ends()
        if args.process_index == 0 and (step or ends):
            start = f"resumes at step {step} from {self._address}" if step else "starts at the beginning"
            show("; ".join([f"{self._name()}: {start}", *ends]))

    def _name(self) -> str:
        """Return the attempt's name, with the number of attempts that its execution can have."""
        retries = os.environ.get(spec.RETRIES)
        if not retries or not self._record.execution:
            return self._record.name
        of_other_actions = self._record.retry - spec.attempts_before()
        return f"{self._record.name} of {of_other_actions + int(retries) + 1}"

    def _ends(self) -> list[str]:
        """Return a phrase on the end of each earlier attempt: those of this execution last."""
        execution, number = self._record.key
        attempts = earlier_attempts.of_run(self._own(self._before))
        others = [attempt for attempt in attempts if attempt.execution != execution]
        named = [f"{other.name} of execution {other.execution}: {other.ended}" for other in others]
        return named + earlier_attempts.lines(self._before, execution, before=number)

    def _own(self, records: Sequence[NodeAttempt]) -> list[NodeAttempt]:
        """Return the records that count: without checkpoints, another execution's are of another run."""
        return [
            record
            for record in records
            if self._has_checkpoints or record.execution == self._record.execution
        ]

    def begin_steps(self) -> None:
        """Begin the training loop."""
        self._loop_began, self._loop_seconds = time.monotonic(), None

    def end_step(self, step: int) -> None:
        """Note that a step was trained."""
        self._update(last_step=step)
        self._has_steps = True

    def end_steps(self) -> None:
        """End the training loop."""
        self._loop_seconds = time.monotonic() - self._loop_began

    def leave_out(self, left_out: list[int], rollbacks: int, order: str) -> None:
        """Record data that later attempts skip; it is stored when this returns."""
        self._update(left_out=left_out, rollbacks=rollbacks, order=order)
        if self._record.file_name:
            earlier_attempts.write(self._address, self.now())

    def earlier(self, steps: Sequence[Step], held_seconds: float) -> list[Attempt]:
        """Return the attempts before this one; the first process calls it.

        What the resumed checkpoint is known to have taken is counted even where no record of it is left: the
        seconds of its logged `steps`, and `held_seconds` of machines.
        """
        if self._record.file_name:
            # Once more: an attempt that was taken for lost may have ended since.
            self._before = [
                attempt
                for attempt in earlier_attempts.read(self._address)
                if attempt.number < self._record.number
            ]
        attempts = earlier_attempts.of_run(self._own(self._before))
        return earlier_attempts.covering(attempts, self.now().figures(), steps, held_seconds)

    def now(self) -> NodeAttempt:
        """Return the record as it is now, with the peaks of this process."""
        now = time.monotonic()
        seconds = now - self._loop_began if self._loop_seconds is None else self._loop_seconds
        record = self._record.replaced(seconds=seconds, held_seconds=now - self._began)
        if self._peaks is None:
            return record
        return record.replaced(peaks=dict(self._peaks.bytes), reserved_peaks=dict(self._peaks.reserved))

    def _keep(self) -> None:
        """Write the record until the attempt has ended, and once more then."""
        pause = SECONDS if Storage(self._address).is_local else PAUSE
        last_write, is_over = 0.0, False
        while not is_over:
            is_due = self._is_due.wait(SECONDS)
            self._is_due.clear()
            is_over = self._is_over
            used, allowed = memory()
            has_grown = used - self._record.used_bytes >= allowed / PARTS
            has_steps = self._has_steps and time.monotonic() - last_write >= pause
            has_signal = self._is_signalled() and self._record.signalled is None
            if has_signal:
                self._update(signalled=time.time(), kind=self._record.kind or SIGTERM)
            if is_due or has_grown or has_steps or has_signal:
                self._update(used_bytes=used, allowed_bytes=allowed)
                self._has_steps, last_write = False, time.monotonic()
                _write(self._address, self.now())
            if is_due:
                self._is_written.set()


_kept: list[tuple[str, NodeAttempt]] = []
"""Address and record of this process's attempt, or of that of the ranks that it has started, once it has
failed."""


def correct(folder: Path, cause: Failure) -> None:
    """Write the cause into the record of a node's ranks, whose failures are reported in `folder`."""
    pointer = folder / POINTER
    if not pointer.exists():
        return
    address, name = json_core.load(pointer.read_bytes())
    for record in earlier_attempts.read(address):
        if record.file_name == name:
            _kept[:] = [(address, record.replaced(kind=cause.kind, reason=without_secrets(cause.sentence)))]
            _write(*_kept[0])


def record_failure(text: FailureText, kind: str, address: str | None) -> None:
    """Record a failure's text, for the report of the run: ranks leave it to the process that has started
    them.

    A task without a record gets one at `address`, where its attempts keep theirs; None on this machine.
    """
    if "LOCAL_RANK" in os.environ:
        return
    if not _kept and address is not None:
        execution, retry = os.environ.get(spec.EXECUTION, ""), spec.attempts_before()
        name = f"{earlier_attempts.PREFIX}0000-0-{secrets.token_hex(4)}.json"
        _kept.append(
            (address, NodeAttempt(number=0, execution=execution, retry=retry, kind=kind, file_name=name))
        )
    for place, record in _kept:
        words = {"reason": text.sentence, "advice": text.advice, "task": text.task, "details": text.details}
        shown = {name: without_secrets(value) for name, value in words.items()}
        _write(place, record.replaced(further=[without_secrets(line) for line in text.further], **shown))


def of_other_actions() -> int:
    """Return how many attempts of this execution other actions have made for the stage of this process."""
    return max([0, *(record.retry - spec.attempts_before() for _, record in _kept)])


def earlier_lines() -> list[str]:
    """Return a line on each attempt of this execution before that of this process, or of the ranks that it
    has started."""
    for address, record in _kept:
        execution, number = record.key
        if execution:
            return earlier_attempts.lines(earlier_attempts.read(address, execution), execution, before=number)
    return []


def _write(address: str, record: NodeAttempt) -> None:
    try:
        earlier_attempts.write(address, record)
    except Exception as error:  # noqa: BLE001 (each file system has errors of its own; a record is no reason to lose a run)
        log.warning("%s: the record of phase %s could not be written: %s", address, record.phase, error)


def _step(saved_step: Callable[[], int]) -> int:
    try:
        return saved_step()
    except StorageError:  # all processes stop for it together, once there is a process group
        return 0


def host() -> str:
    """Return the name of this node in Kubernetes, or elsewhere of this machine."""
    return os.environ.get(spec.NODE) or socket.gethostname()


def reason_of(error: BaseException) -> str:
    """Return the reason of an attempt that ends with an error."""
    # A local run leaves with the exit code of a shell's command that SIGINT has ended.
    if isinstance(error, KeyboardInterrupt) or getattr(error, "code", None) == 128 + signal.SIGINT:
        return "ended by Ctrl-C"
    if not isinstance(error, Exception):
        return f"ended by {type(error).__name__}"
    return without_secrets(reports.of_error(error, rank=int(os.environ.get("RANK", "0"))).sentence)
