"""Recoverable and final failures of tasks, raised as the exceptions that make Flyte retry or stop.

flytekit treats every exception other than FlyteRecoverableException as final.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flytekit.exceptions.base import FlyteException
from flytekit.exceptions.user import FlyteRecoverableException

from flytune.failures import Failure, FailureText, reports, task_name
from flytune.failures.table import RETRIES
from flytune.training import PhaseNotes
from tasks.runtime import console
from tasks.runtime.directories import attempt_notes_address


class RunFailed(FlyteException):
    """Final failure: Flyte makes no further attempt. Its text is the message alone."""

    _ERROR_CODE = "RunFailed"

    def __init__(self, text: FailureText, timestamp: float | None = None) -> None:
        super().__init__(str(text), timestamp=timestamp)
        self.text = text

    def __str__(self) -> str:
        return str(self.args[0])


class AttemptFailed(RunFailed, FlyteRecoverableException):
    """Recoverable failure: Flyte starts another attempt while any is left."""

    _ERROR_CODE = "AttemptFailed"


@contextmanager
def report_failures() -> Iterator[None]:
    """Report a rank's exception to its parent process, and raise it as recoverable or final by the table of failures."""
    try:
        yield
    except Exception as error:
        failure = reports.of_error(error, int(os.environ.get("RANK", "0")))
        reports.report(failure)
        raise flyte_error(failure) from error


@contextmanager
def classify_failures() -> Iterator[None]:
    """Raise exceptions that the table of failures calls recoverable as AttemptFailed, for tasks of one process with retries.

    All other exceptions are raised unchanged.
    """
    try:
        yield
    except Exception as error:
        failure = reports.of_error(error, rank=0)
        if failure.recoverable:
            raise flyte_error(failure, is_alone=True) from error
        raise


@contextmanager
def record_phase(phase: str) -> Iterator[None]:
    """Write phase notes for a task of one process that loads a model; refuse a third attempt where two were killed.

    Raises:
        KilledAgain: two attempts were killed.
    """
    if (address := attempt_notes_address()) is None:
        yield
        return
    signals: list[int] = []
    notes = PhaseNotes(address, is_signalled=lambda: bool(signals))

    def end(number: int, frame: Any) -> None:
        """Record SIGTERM, so that an eviction is not taken for a kill; then end the process as before."""
        signals.append(number)
        notes.write_now()
        if callable(previous):
            previous(number, frame)
        else:
            # The signal itself does not end process 1 of a pod.
            os._exit(128 + number)

    with notes.attempt(phase=phase):
        previous = signal.signal(signal.SIGTERM, end)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)


def flyte_error(failure: Failure, is_alone: bool = False) -> RunFailed:
    """Return the exception that makes Flyte retry or stop, as the failure requires; `is_alone` leaves the rank out.

    Of several nodes' errors, Flyte shows the earliest.
    """
    rank = "" if is_alone else f"rank {failure.rank}: "
    outcome = _next_attempt() if failure.recoverable else "the run does not go on by itself"
    lines = (outcome, *console.log_lines())
    text = FailureText(f"{rank}{failure.sentence}", failure.advice, task_name(), lines, failure.details)
    return (AttemptFailed if failure.recoverable else RunFailed)(text, timestamp=failure.time)


def _next_attempt() -> str:
    if not (attempt := os.environ.get("FLYTE_ATTEMPT_NUMBER")):
        return "recoverable: on a cluster, Flyte starts another attempt; here, run it again"
    done, most = int(attempt) + 1, RETRIES + 1
    return f"recoverable: attempt {done} of {most}; " + ("Flyte starts another" if done < most else "none is left")
