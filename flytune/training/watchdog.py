"""A run that hangs ends in minutes, with a stack of each rank, and not after the process group's half hour."""

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
from flytune.records.plan import FIRST_STEP, STEP
from flytune.training.memory_peaks import Peaks

log = logging.getLogger(__name__)

SLOWEST_STEPS = 10
"""A step may take so many times the slowest so far."""
LONGEST = 6
"""What is not a step may take so many times training.hang_minutes; the first step, which compiles, half of that."""
SECONDS_FOR_OTHERS = 3.0
"""Between a rank's stack and its end, so that the others write theirs."""


def process_group_seconds(minutes: float) -> int:
    """The process group's timeout: beyond every bound of the watch, so that stacks come first."""
    return int(LONGEST * minutes * 60) + 300


class Watch:
    """A thread that ends the process when neither a step nor a phase was finished within the bound."""

    def __init__(self, minutes: float, run_peaks: Peaks) -> None:
        self._seconds, self._phase, self._done = minutes * 60, run_peaks.phase, 0
        self._beat, self._slowest = time.monotonic(), 0.0
        self._over = threading.Event()
        enter = run_peaks.enter

        def entered(phase: str) -> None:
            self._phase, self._beat = phase, time.monotonic()
            enter(phase)

        run_peaks.enter = entered  # type: ignore[method-assign]

    def __enter__(self) -> "Watch":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR2, self._raise)
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._before)

    def end_step(self, step: int) -> None:
        """A step is over."""
        now = time.monotonic()
        self._slowest = max(self._slowest, now - self._beat) if self._phase == STEP else 0.0
        self._done, self._beat = step, now

    def limit(self) -> float:
        """Seconds that what runs now may take."""
        if self._phase == STEP:
            return min(max(self._seconds, SLOWEST_STEPS * self._slowest), LONGEST * self._seconds)
        return self._seconds * (LONGEST / 2 if self._phase == FIRST_STEP else LONGEST)

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._seconds / 10)):
            if (waited := time.monotonic() - self._beat) > self.limit():
                self._end(waited)

    def _message(self, waited: float) -> str:
        return f"nothing finished for {waited:.0f} s in {self._phase}, after step {self._done} (training.hang_minutes)"

    def _end(self, waited: float) -> None:
        """In the thread: tells where the main thread stands, and ends the process. A rank in a collective hears nothing."""
        rank, main = int(os.environ.get("RANK", "0")), threading.main_thread().ident
        log.error("rank %d: %s; the stacks of its threads:", rank, self._message(waited))
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        stack = "".join(traceback.format_stack(sys._current_frames()[main or 0])[-12:])
        failure = reports.of_error(Hang(self._message(waited)), rank).model_copy(update={"details": stack})
        reports.report(failure)
        if not os.environ.get(reports.FOLDER) and main:
            # Alone: nobody else would tell Flyte. Interrupts what Python waits for.
            signal.pthread_kill(main, signal.SIGUSR2)
        if not self._over.wait(SECONDS_FOR_OTHERS):
            os._exit(1)

    def _raise(self, number: int, frame: Any) -> None:
        self._over.set()
        raise Hang(f"{self._message(time.monotonic() - self._beat)}:\n{''.join(traceback.format_stack(frame)[-12:])}")


def callback(watch: Watch) -> Any:
    """The watch as the Trainer knows it."""
    from transformers import TrainerCallback

    class Watching(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.end_step(state.global_step)

    return Watching()
