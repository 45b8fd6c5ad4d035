"""What is worth another attempt, raised as what Flyte retries: flytekit calls every other exception of a task final."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from flytekit.exceptions.base import FlyteException
from flytekit.exceptions.user import FlyteRecoverableException

from flytune import causes
from flytune.causes import Failure
from flytune.failures import RETRIES


class RunFailed(FlyteException):
    """Final: no attempt is made after it. Says nothing around its message."""

    _ERROR_CODE = "RunFailed"

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
        failure = causes.of_error(error, rank=0)
        if failure.recoverable:
            raise raised(failure, str(failure).removeprefix("rank 0: ")) from error
        raise


def raised(failure: Failure, text: str) -> RunFailed:
    """The exception with which Flyte does what the failure says. The earliest of several nodes' is shown."""
    if failure.recoverable:
        return AttemptFailed(f"{text}\n{_next()}", timestamp=failure.time)
    return RunFailed(f"{text}\nthe run does not go on by itself", timestamp=failure.time)


def _next() -> str:
    if not (attempt := os.environ.get("FLYTE_ATTEMPT_NUMBER")):
        return "recoverable: on a cluster, Flyte starts another attempt; here, run it again"
    done, most = int(attempt) + 1, RETRIES + 1
    return f"recoverable: attempt {done} of {most}; " + ("Flyte starts another" if done < most else "none is left")
