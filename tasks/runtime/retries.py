"""Recoverable and final failures of tasks, raised as the exceptions that make Flyte retry or stop.

flytekit treats every exception other than FlyteRecoverableException as final.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from flytekit.exceptions.base import FlyteException
from flytekit.exceptions.user import FlyteRecoverableException

from flytune.failures import Failure, FailureText, reports
from flytune.stages import attempts
from tasks.runtime import interrupts
from tasks.runtime.orchestrator import attempts_address


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
    """Report a rank's exception to its parent process, and raise it as recoverable or final by the table of
    failures."""
    try:
        yield
    except KeyboardInterrupt:
        if "RANK" in os.environ:
            # The process that has started the ranks gets the signal, too.
            raise
        interrupts.stop()
    except Exception as error:
        failure = reports.of_error(error, int(os.environ.get("RANK", "0")))
        reports.report(failure)
        raise flyte_error(failure) from error


@contextmanager
def classify_failures() -> Iterator[None]:
    """Raise exceptions that the table of failures calls recoverable as AttemptFailed, for tasks of one
    process with retries.

    All other exceptions are raised unchanged.
    """
    try:
        yield
    except Exception as error:
        failure = reports.of_error(error, rank=0)
        if failure.recoverable:
            raise flyte_error(failure, is_alone=True) from error
        raise


def record_phase(phase: str) -> AbstractContextManager[None]:
    """Keep the record of a task of one process that loads a model; refuse a third attempt where two were
    killed."""
    return attempts.record_phase(phase, attempts_address())


def flyte_error(failure: Failure, is_alone: bool = False) -> RunFailed:
    """Return the exception that makes Flyte retry or stop, as the failure requires; `is_alone` leaves the
    rank out.

    Of several nodes' errors, Flyte shows the earliest.
    """
    address = None if "LOCAL_RANK" in os.environ else attempts_address()
    text = attempts.text_of(failure, is_alone, address=address)
    return (AttemptFailed if failure.recoverable else RunFailed)(text, timestamp=failure.time)
