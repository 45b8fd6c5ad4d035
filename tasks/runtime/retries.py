"""What is worth another attempt, raised as what Flyte retries: flytekit calls every other exception of a task final."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flytekit.exceptions.base import FlyteException
from flytekit.exceptions.user import FlyteRecoverableException

from flytune.failures import reports
from flytune.failures.reports import Failure
from flytune.failures.table import RETRIES
from flytune.failures.text import FailureText, task_name
from flytune.training.phase_notes import PhaseNotes
from tasks.runtime import console
from tasks.runtime.directories import attempts_place


class RunFailed(FlyteException):
    """Final: no attempt is made after it. Says nothing around its message."""

    _ERROR_CODE = "RunFailed"

    def __init__(self, text: FailureText, timestamp: float | None = None) -> None:
        super().__init__(str(text), timestamp=timestamp)
        self.text = text

    def __str__(self) -> str:
        return str(self.args[0])


class AttemptFailed(RunFailed, FlyteRecoverableException):
    """Recoverable: Flyte starts another attempt, while any is left."""

    _ERROR_CODE = "AttemptFailed"


@contextmanager
def retried() -> Iterator[None]:
    """In a task of one process, with retries: raises as recoverable what the table of failures calls so, all else as it is."""
    try:
        yield
    except Exception as error:
        failure = reports.of_error(error, rank=0)
        if failure.recoverable:
            raise raised(failure, is_alone=True) from error
        raise


@contextmanager
def noted(phase: str) -> Iterator[None]:
    """Keep the notes of a task of one process that loads a model; refuse a third attempt where two were killed.

    Raises:
        KilledAgain: they were.
    """
    if (place := attempts_place()) is None:
        yield
        return
    signals: list[int] = []
    notes = PhaseNotes(place, is_signalled=lambda: bool(signals))

    def end(number: int, frame: Any) -> None:
        """Note SIGTERM, so that an eviction is not taken for a kill; then end the process as it would have ended."""
        signals.append(number)
        notes.write_now()
        if callable(before):
            before(number, frame)
        else:
            # Not by the signal itself: process 1 of a pod is not ended by it.
            os._exit(128 + number)

    with notes.attempt(phase=phase):
        before = signal.signal(signal.SIGTERM, end)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def raised(failure: Failure, is_alone: bool = False) -> RunFailed:
    """Return the exception with which Flyte does what the failure says; of a process that `is_alone`, without its rank.

    The earliest of several nodes' is shown.
    """
    rank = "" if is_alone else f"rank {failure.rank}: "
    outcome = _next() if failure.recoverable else "the run does not go on by itself"
    further = (outcome, *console.log_lines())
    text = FailureText(f"{rank}{failure.sentence}", failure.advice, task_name(), further, failure.details)
    return (AttemptFailed if failure.recoverable else RunFailed)(text, timestamp=failure.time)


def _next() -> str:
    if not (attempt := os.environ.get("FLYTE_ATTEMPT_NUMBER")):
        return "recoverable: on a cluster, Flyte starts another attempt; here, run it again"
    done, most = int(attempt) + 1, RETRIES + 1
    return f"recoverable: attempt {done} of {most}; " + ("Flyte starts another" if done < most else "none is left")
