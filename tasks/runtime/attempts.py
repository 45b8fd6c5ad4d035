"""Attempts as Flyte counts them: what is worth another one is raised as what Flyte retries, and the cause is named.

flytekit's Elastic calls a killed rank, a lost peer and most exceptions final, and takes a SIGTERM for success without outputs.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flytekit.core.base_task import IgnoreOutputs
from flytekit.extend import TaskPlugins
from flytekitplugins.kfpytorch import Elastic
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask

from flytune.errors import Preempted, StorageError
from flytune.failures import reports
from flytune.failures.reports import Failure
from flytune.records.plan import Plan
from flytune.training import phase_notes
from tasks.runtime import ending
from tasks.runtime.retries import raised


@contextmanager
def told() -> Iterator[None]:
    """In a rank: reports what it dies of, and raises it as recoverable where the table of failures says so."""
    try:
        yield
    except Exception as error:
        failure = reports.of_error(error, int(os.environ.get("RANK", "0")))
        reports.report(failure)
        raise raised(failure) from error


class Ranks(Elastic):
    """Elastic whose parent process judges how its ranks have failed."""


class RanksTask(PytorchElasticFunctionTask):
    """Starts the ranks; what it raises names the first that failed, and is recoverable by the table of failures."""

    def _execute(self, **kwargs: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="flytune-failures-") as folder:
            os.environ[reports.FOLDER] = folder
            try:
                return super()._execute(**kwargs)
            except IgnoreOutputs as error:
                ending.outlive_sigterm()
                if isinstance(error.__context__, _signal_exception()):
                    found = reports.reported(Path(folder)) or [reports.of_error(_unsaid(), rank=_first_rank())]
                elif not (found := _awaited(kwargs.get("plan"))):
                    raise
            except Exception as error:  # noqa: BLE001 (raised again, with its cause named)
                ending.outlive_sigterm()
                found = _all(error, Path(folder))
            finally:
                del os.environ[reports.FOLDER]
            cause = reports.first(found)
            phase_notes.correct(Path(folder), cause.kind)
            if cause.notices and self.max_nodes > 1:
                if ending.another_reports():
                    raise IgnoreOutputs
                # Flyte shows the earliest, and a cause that is reported later still is one.
                cause = cause.model_copy(update={"time": time.time()})
            raise raised(cause)


TaskPlugins.register_pythontask_plugin(Ranks, RanksTask)


def _awaited(plan: Plan | None) -> list[Failure]:
    """Return what has failed when the ranks of a node without rank 0 had finished, and the outputs did not come."""
    try:
        # Exported parameters have four bytes at most.
        ending.wait_for_outputs(4 * plan.trained_parameters if plan else 0)
    except StorageError as error:
        return [reports.of_error(error, _first_rank())]
    return []


def _all(error: Exception, folder: Path) -> list[Failure]:
    """What the ranks have reported, and those that could not; the agent's own error where no rank has failed."""
    found = reports.reported(folder)
    known = {failure.rank for failure in found}
    for child in _child_failures(error):
        for rank, process in child.items():
            if rank not in known:
                # In whole seconds; torchelastic has ended the others since, which may take 30.
                seen = min(time.time(), process.timestamp + 1.0)
                found.append(reports.of_exit(process.exitcode, rank).model_copy(update={"time": seen}))
    return found or [reports.of_error(error, _first_rank())]


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
