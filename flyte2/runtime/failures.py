"""Failures as Flyte 2's errors, the reverse of Flyte 1's: every error is retried, unless it is a
NonRecoverableError."""

from collections.abc import Iterator
from contextlib import contextmanager

from flyte.errors import NonRecoverableError, RuntimeUserError

from flyte2.runtime.orchestrator import current
from flytune.failures import Failure, reports
from flytune.failures.table import OUT_OF_GPU_MEMORY
from flytune.stages import attempts
from flytune.stages.ranks import StageFailed

OUT_OF_MEMORY = "OOMOutOfGPUMemory"
"""Code of a failure for GPU memory: Flyte 2 makes an OOMError of every code with these three letters."""
_OOM = (OUT_OF_GPU_MEMORY, "killed again")
"""Kinds of failures for which machines with more memory are the remedy."""
_HERE = "recoverable: Flyte starts another attempt, if any is left"


@contextmanager
def classified(task: str, has_ranks: bool) -> Iterator[None]:
    """Raise errors as those that make Flyte retry or stop, by the table of failures."""
    try:
        yield
    except StageFailed as error:
        raise raised(error.failure, task, has_ranks) from error
    except Exception as error:
        raise raised(reports.of_error(error, rank=0), task) from error


def raised(failure: Failure, task: str, has_ranks: bool = False) -> RuntimeUserError:
    """Return the error that makes Flyte retry or stop, as the table of failures requires."""
    text = str(attempts.text_of(failure, not has_ranks, task, _HERE, current().attempts_address()))
    if failure.recoverable:
        return RuntimeUserError("AttemptFailed", text)
    return NonRecoverableError(text, OUT_OF_MEMORY if failure.kind in _OOM else "RunFailed")
