"""End of a process whose main thread waits in a library when SIGTERM or Ctrl-C comes, before its first step.

Python runs a signal's handler between two instructions of the main thread: one that waits for a process
group, a store or a disk in C runs none, for as long as that waits. The number of the signal arrives in a pipe
at once.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

SECONDS = 2.0
"""Seconds from a signal that its handler has to run."""


class UnheardSignals:
    """Context in which a process ends by itself if the handlers of SIGTERM and SIGINT do not run; of the main
    thread alone."""

    def __init__(self, end: Callable[[int], None]) -> None:
        """Call `end` with the number of a signal that was not heard, in another thread; then the process
        exits."""
        self._end, self._heard, self._over = end, threading.Event(), False
        self._ends: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "UnheardSignals":
        if (other := signal.set_wakeup_fd(-1)) != -1:  # an event loop's
            signal.set_wakeup_fd(other)
            return self
        os.register_at_fork(after_in_child=self._leave_to_parent)
        self._ends = list(os.pipe())
        os.set_blocking(self._ends[1], False)
        signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            if callable(before := signal.getsignal(number)):
                self._before[number] = before
                signal.signal(number, self._hear)
        threading.Thread(target=self._listen, args=[self._ends[0]], name="signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave signals to their handlers alone."""
        if not self._ends or self._over:
            return
        self._over = True
        self._heard.set()
        signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, before)
        os.close(self._ends[1])  # which ends the thread

    def _leave_to_parent(self) -> None:
        # A signal of a forked process would arrive in the same pipe.
        if not self._over:
            signal.set_wakeup_fd(-1)

    def _hear(self, number: int, frame: Any) -> None:
        self._heard.set()
        self._before[number](number, frame)

    def _listen(self, end: int) -> None:
        while number := os.read(end, 1):
            if number[0] in self._before and not self._heard.wait(SECONDS):
                self._end(number[0])
                os._exit(128 + number[0])
        os.close(end)
