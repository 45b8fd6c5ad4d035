"""Watchdog that ends a hanging run, with a stack of each rank, before the process group's timeout."""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

from flytune.errors import Hang
from flytune.failures import reports
from flytune.records.plan import FIRST_STEP, LOAD, STEP

log = logging.getLogger(__name__)

SLOWEST_STEPS = 10
"""Limit of a step, as a multiple of the slowest step so far; LONGEST bounds it."""
LONGEST = 6
"""Limit of other phases, as a multiple of training.hang_minutes; half of it for the first step, which
compiles."""
PAUSE = 1.0
"""Longest time in seconds between two looks at the clock."""
STOPPED = 60.0
"""Seconds between two looks after which the process was stopped (Ctrl-Z, a laptop that sleeps): such time is
no part of a step or phase."""
SECONDS_FOR_OTHERS = 3.0
"""Seconds between a rank's stack and its end, in which the other ranks write theirs."""


def process_group_seconds(minutes: float) -> int:
    """Return the process group's timeout, longer than every limit of the watchdog, so that stacks are written
    first."""
    return int(LONGEST * minutes * 60) + 300


def now() -> float:
    """Return the seconds of a clock that is never set back."""
    return time.monotonic()


class Watch:
    """Thread that ends the process when neither a step nor a phase was finished within its limit."""

    def __init__(self, minutes: float) -> None:
        """Begin with phase LOAD; `minutes` is training.hang_minutes."""
        self._seconds, self._phase, self._done = minutes * 60, LOAD, 0
        self._beat, self._slowest = now(), 0.0
        self._over = threading.Event()

    def __enter__(self) -> "Watch":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR2, self._raise)
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._before)

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self._phase, self._beat = phase, now()

    def end_step(self, step: int) -> None:
        """Note that a step has finished."""
        ended = now()
        self._slowest = max(self._slowest, ended - self._beat) if self._phase == STEP else 0.0
        self._done, self._beat = step, ended

    def limit(self) -> float:
        """Return the seconds that the running step or phase may take."""
        if self._phase == STEP:
            return min(max(self._seconds, SLOWEST_STEPS * self._slowest), LONGEST * self._seconds)
        return self._seconds * (LONGEST / 2 if self._phase == FIRST_STEP else LONGEST)

    def _watch(self) -> None:
        looked = now()
        while not self._over.wait(min(PAUSE, self._seconds / 10)):
            before, looked = looked, now()
            if looked - before > STOPPED:
                # No later than now: a step may have ended since the process goes on.
                self._beat = min(self._beat + looked - before, looked)
            waited = looked - self._beat
            if waited > self.limit():
                self._end(waited)

    def _message(self, waited: float) -> str:
        return (
            f"nothing finished for {waited:.0f} s in {self._phase}, after step {self._done} "
            "(training.hang_minutes)"
        )

    def _end(self, waited: float) -> None:
        """Report the main thread's stack and end the process; in a thread: a rank in a collective runs no
        signal handlers."""
        rank, main = int(os.environ.get("RANK", "0")), threading.main_thread().ident
        log.error("rank %d: %s; the stacks of its threads:", rank, self._message(waited))
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        stack = "".join(traceback.format_stack(sys._current_frames()[main or 0])[-12:])
        failure = reports.of_error(Hang(self._message(waited)), rank).model_copy(update={"details": stack})
        reports.report(failure)
        if not os.environ.get(reports.FOLDER) and main:
            # A single process has nobody else to report to Flyte: the signal interrupts what Python waits
            # for.
            signal.pthread_kill(main, signal.SIGUSR2)
        if not self._over.wait(SECONDS_FOR_OTHERS):
            os._exit(1)

    def _raise(self, number: int, frame: Any) -> None:
        self._over.set()
        raise Hang(f"{self._message(now() - self._beat)}:\n{''.join(traceback.format_stack(frame)[-12:])}")
