"""Elastic (torchrun) tasks whose failures are classified by the table of failures.

flytekit's Elastic calls a killed rank, a lost peer and most exceptions final, and takes a SIGTERM for success
without outputs.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytekit.core.base_task import IgnoreOutputs
from flytekit.extend import TaskPlugins
from flytekitplugins.kfpytorch import CleanPodPolicy, Elastic, RunPolicy
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask

from flytune.errors import StorageError
from flytune.failures import Failure, reports
from flytune.hardware import Shape, load_cluster
from flytune.records import Plan
from flytune.stages import ranks as stages_ranks
from tasks.runtime import forked_ranks, interrupts, termination
from tasks.runtime.retries import flyte_error


@dataclass
class Ranks(Elastic):
    """Elastic whose parent process classifies the failures of its ranks."""

    fetch: Callable[..., Any] | None = None
    """Function that fetches the inputs of a task that trains; its ranks are forked, where that is
    possible."""


class RanksTask(PytorchElasticFunctionTask):
    """Task that starts the ranks; its error names the rank that failed first, and is recoverable by the table
    of failures."""

    def __init__(self, task_config: Ranks, task_function: Any, **arguments: Any) -> None:
        """Declare the task as the plugin does, but without torch, which the plugin imports to read the number
        of nodes."""
        kind = self._ELASTIC_TASK_TYPE_STANDALONE if task_config.nnodes == 1 else self._ELASTIC_TASK_TYPE
        # The plugin's task_type_version.
        common = {"task_type": kind, "task_type_version": 1}
        super(PytorchElasticFunctionTask, self).__init__(task_config, task_function, **common, **arguments)
        self.min_nodes = self.max_nodes = int(task_config.nnodes)
        self.rdzv_backend = "c10d"

    def _execute(self, **kwargs: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="flytune-failures-") as folder:
            os.environ[reports.FOLDER] = folder
            try:
                return self._start(**kwargs)
            except IgnoreOutputs as error:
                termination.ignore_sigterm()
                if isinstance(error.__context__, _signal_exception()):
                    if getattr(error.__context__, "sigval", None) == signal.SIGINT:
                        interrupts.note(kwargs["recipe"])
                        interrupts.stop()
                    found = reports.reported(Path(folder)) or [
                        reports.of_error(stages_ranks.unreported(), rank=stages_ranks.first_rank())
                    ]
                elif not (found := _failures_after_ranks(kwargs.get("plan"))):
                    raise
            except Exception as error:  # noqa: BLE001 (raised again, with its cause named)
                termination.ignore_sigterm()
                found = stages_ranks.failures(error, Path(folder))
            finally:
                del os.environ[reports.FOLDER]
            cause = stages_ranks.cause(found, Path(folder))
            if cause.notices and self.max_nodes > 1:
                if termination.another_pod_reports():
                    raise IgnoreOutputs
                # Flyte shows the earliest error; a cause that another pod reports after this one must be
                # earlier.
                cause = cause.model_copy(update={"time": time.time()})
            raise flyte_error(cause)

    def _start(self, **inputs: Any) -> Any:
        """Run the ranks, forked from this process if it can import their libraries."""
        config, function = self.task_config, self.task_function
        if config.fetch is not None:
            config.start_method = "fork" if forked_ranks.prepare(config.fetch, **inputs) else "spawn"
        if config.start_method == "fork":
            self._task_function = forked_ranks.in_rank(function)
        try:
            return super()._execute(**inputs)
        finally:
            self._task_function = function


TaskPlugins.register_pythontask_plugin(Ranks, RanksTask)


def ranks(shape: Shape, processes: int, fetch: Callable[..., Any] | None = None) -> Ranks:
    """Return the configuration of one torchrun job over the shape's nodes, with `processes` processes a node.

    `fetch` fetches the inputs of a task that trains, while its libraries are imported; then the ranks are
    forked.
    """
    return Ranks(
        nnodes=shape.nodes,
        nproc_per_node=processes,
        monitor_interval=stages_ranks.MONITOR_SECONDS,
        rdzv_configs=stages_ranks.rendezvous_seconds(load_cluster()),
        # The pod template mounts /dev/shm; Elastic's own mount would be a second one.
        increase_shared_mem=False,
        # Without it, the operator keeps the peers of a lost pod waiting on their GPUs while the next attempt
        # runs.
        run_policy=RunPolicy(clean_pod_policy=CleanPodPolicy.RUNNING),
        fetch=fetch,
    )


def _failures_after_ranks(plan: Plan | None) -> list[Failure]:
    """Wait for the outputs on a node without rank 0 whose ranks have ended; return a failure if they do not
    come."""
    try:
        # Exported parameters have four bytes at most.
        termination.wait_for_outputs(4 * plan.trained_parameters if plan else 0)
    except StorageError as error:
        return [reports.of_error(error, stages_ranks.first_rank())]
    return []


def _signal_exception() -> type[Exception]:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    return SignalException
