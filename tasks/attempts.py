"""Attempts as Flyte counts them: what is worth another one is raised as what Flyte retries, and the cause is named.

flytekit's Elastic calls a killed rank, a lost peer and most exceptions final, and takes a SIGTERM for success without outputs.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flytekit.core.base_task import IgnoreOutputs
from flytekit.extend import TaskPlugins
from flytekitplugins.kfpytorch import Elastic
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask

from flytune import causes
from flytune.causes import Failure
from flytune.errors import Preempted
from tasks.retrying import RunFailed, raised


@contextmanager
def told() -> Iterator[None]:
    """In a rank: reports what it dies of, and raises it as recoverable where the table of failures says so."""
    try:
        yield
    except Exception as error:
        failure = causes.of_error(error, int(os.environ.get("RANK", "0")))
        causes.report(failure)
        raise raised(failure, str(failure)) from error


class Ranks(Elastic):
    """Elastic whose parent process judges how its ranks have failed."""


class RanksTask(PytorchElasticFunctionTask):
    """Starts the ranks; what it raises names the first that failed, and is recoverable by the table of failures."""

    def _execute(self, **kwargs: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="flytune-failures-") as folder:
            os.environ[causes.FOLDER] = folder
            try:
                return super()._execute(**kwargs)
            except IgnoreOutputs as error:
                if not isinstance(error.__context__, _signal_exception()):  # another node than rank 0's has finished
                    raise
                found = causes.reported(Path(folder)) or [causes.of_error(_unsaid(), rank=_first_rank())]
                raise _judged(found) from None
            except Exception as error:  # noqa: BLE001 (raised again, with its cause named)
                raise _judged(_all(error, Path(folder))) from None
            finally:
                del os.environ[causes.FOLDER]


TaskPlugins.register_pythontask_plugin(Ranks, RanksTask)


def _judged(found: list[Failure]) -> RunFailed:
    cause = causes.first(found)
    return raised(cause, str(cause))


def _all(error: Exception, folder: Path) -> list[Failure]:
    """What the ranks have reported, and those that could not; the agent's own error where no rank has failed."""
    found = causes.reported(folder)
    known = {failure.rank for failure in found}
    for child in _child_failures(error):
        for rank, process in child.items():
            if rank not in known:
                found.append(causes.of_exit(process.exitcode, rank))
    return found or [causes.of_error(error, _first_rank())]


def _child_failures(error: Exception) -> Iterator[dict[int, Any]]:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for link in (error, getattr(error, "value", None), error.__context__):
        if isinstance(link, ChildFailedError):
            yield link.failures
            return


def _signal_exception() -> type[Exception]:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    return SignalException


def _unsaid() -> Preempted:
    return Preempted("the pod got SIGTERM, and the ranks were ended before they could say what they have saved", goes_on=True)


def _first_rank() -> int:
    """The node's, for errors of the process that starts the ranks."""
    return int(os.environ.get("PET_NODE_RANK", "0"))
