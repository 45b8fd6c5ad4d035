"""Recoverable and final failures of tasks, raised as the exceptions that make Flyte retry or stop.

flytekit treats every exception other than FlyteRecoverableException as final.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from flytekit.core.base_task import IgnoreOutputs
from flytekit.exceptions.base import FlyteException
from flytekit.exceptions.user import FlyteRecoverableException

from flytune.failures import Failure, FailureText, reports
from flytune.stages import attempts, ranks
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
def classified(trains: bool = False) -> Iterator[None]:
    """Raise failures as those that make Flyte retry or stop, by the table of failures.

    Final errors of a task that starts no ranks and does not train are raised unchanged.

    Args:
        trains: whether the task trains, so that all its failures are raised so, with their rank.
    """
    try:
        yield
    except IgnoreOutputs:
        raise
    except ranks.StageFailed as error:
        raise flyte_error(error.failure) from None
    except Exception as error:
        failure = reports.of_error(error, ranks.first_rank())
        if trains or failure.recoverable:
            raise flyte_error(failure, is_alone=not trains) from error
        raise


def flyte_error(failure: Failure, is_alone: bool = False) -> RunFailed:
    """Return the exception that makes Flyte retry or stop, as the failure requires; `is_alone` leaves the
    rank out.

    Of several nodes' errors, Flyte shows the earliest.
    """
    text = attempts.text_of(failure, is_alone, address=attempts_address())
    return (AttemptFailed if failure.recoverable else RunFailed)(text, timestamp=failure.time)
