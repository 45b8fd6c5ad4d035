"""Ranks of a node, and the process that starts them: forked where that is possible, their failures by the
table of failures."""

import atexit
import contextvars
import functools
import gc
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flytune import patches, process_setup
from flytune.errors import Preempted
from flytune.failures import Failure, reports
from flytune.hardware import Cluster, load_cluster, shape_named
from flytune.models import clean_process
from flytune.recipe import Recipe
from flytune.records import Plan
from flytune.stages.orchestrator import Orchestrator
from flytune.training import attempt, libraries

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
MONITOR_SECONDS = 1
"""Interval at which torchelastic looks after its ranks."""


class StageFailed(Exception):
    """Failure of a stage, classified by the table of failures."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class NoResult(Exception):
    """End of the ranks of a node without rank 0: another node has the result."""


def prepare(
    orchestrator: Orchestrator, fetch: Callable[..., Any], recipe: Recipe, plan: Plan, **inputs: Any
) -> bool:
    """Import what training needs while `fetch` gets the inputs; return True if the ranks can be forked from
    this process.

    Errors of `fetch` are left to the ranks, which call it again and report them. In a local run, the process
    that evaluates is forked as well.
    """
    if clean_process.has_computed():
        return False
    shape = shape_named(plan.shape)
    if not orchestrator.is_local() and shape.processes > 1:
        # As torchrun does it, but before torch is imported.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ThreadPoolExecutor(1) as executor:
        executor.submit(contextvars.copy_context().run, functools.partial(fetch, **inputs))
        libraries.import_before_fork(shape.is_gpu, [recipe.objective.name])
    if not libraries.can_fork():
        return False
    if orchestrator.is_local() and not shape.is_gpu:
        clean_process.fork()
    return True


def in_rank(function: Callable[..., Any], begin: Callable[[], None] = lambda: None) -> Callable[..., Any]:
    """Return a function for forked ranks, without the signal handlers and exit functions of the parent;
    `begin` comes first."""

    @functools.wraps(function)
    def run(**inputs: Any) -> Any:
        import torch

        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        # Until it has steps to save: Python's handler would wait for calls into libraries, such as for a lost
        # peer.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Otherwise each garbage collection goes through the objects of the parent, and copies their pages.
        gc.freeze()
        begin()
        # In a local run the parent has loaded torch with more threads. OpenMP's variable may be a list, of
        # which the first number counts here; it ignores what it cannot read.
        threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        torch.set_num_threads(
            int(threads) if threads.isdecimal() and int(threads) else torch.get_num_threads()
        )
        atexit._clear()
        try:
            return function(**inputs)
        finally:
            # A forked process ends without it; trackers finish their runs here.
            atexit._run_exitfuncs()

    return run


def rendezvous_seconds(cluster: Cluster) -> dict[str, int]:
    """Return torchrun's timeouts in seconds; read_timeout would stay at torch's 60 otherwise."""
    return dict.fromkeys(("timeout", "join_timeout", "read_timeout"), int(cluster.node_start_minutes * 60))


def _work(function: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    """Do one rank's work; report its failure to the process that started it."""
    try:
        return function(**inputs)
    except Exception as error:
        reports.report(reports.of_error(error, int(os.environ.get("RANK", "0"))))
        raise


def start(
    function: Callable[..., Any], nodes: int, processes: int, forks: bool, inputs: Mapping[str, Any]
) -> Any:
    """Run `processes` ranks on this one of `nodes` nodes by torchelastic; return rank 0's result.

    Args:
        forks: True to fork the ranks from this process (`prepare`), False to start new interpreters.

    Raises:
        StageFailed: the failure of the rank that failed first.
        NoResult: rank 0 is on another node.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if processes > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    endpoint = os.environ.get("PET_RDZV_ENDPOINT", "")
    config = LaunchConfig(
        # The same on all nodes. On Flyte 2 nobody sets the first one, and the endpoint names job and attempt.
        run_id=os.environ.get("PET_RDZV_ID") or endpoint or uuid.uuid4().hex,
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_configs=rendezvous_seconds(load_cluster()),
        rdzv_endpoint=endpoint or "localhost:0",
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
        start_method="fork" if forks else "spawn",
    )
    with tempfile.TemporaryDirectory(prefix="flytune-failures-") as folder:
        os.environ[reports.FOLDER] = folder
        try:
            ends = process_setup.outside_logging(patches.torch.TERMINATION.current())
            with patches.torch.TERMINATION.replaced(ends):
                results = elastic_launch(config, _work)(in_rank(function) if forks else function, inputs)
        except SignalException as error:
            if getattr(error, "sigval", None) == signal.SIGINT:
                raise KeyboardInterrupt from error
            failures_found = reports.reported(Path(folder)) or [
                reports.of_error(unreported(), rank=first_rank())
            ]
        except Exception as error:  # noqa: BLE001 (raised again, with its cause named)
            failures_found = failures(error, Path(folder))
        else:
            if 0 not in results:
                raise NoResult
            return results[0]
        finally:
            del os.environ[reports.FOLDER]
        raise StageFailed(cause(failures_found, Path(folder)))


def cause(failures_found: list[Failure], folder: Path) -> Failure:
    """Return the cause of the ranks' failures, by which the record of this attempt is corrected."""
    first = reports.first(failures_found)
    attempt.correct(folder, first)
    return first


def failures(error: BaseException, folder: Path) -> list[Failure]:
    """Return the failures that ranks reported and those of ranks that could not; the agent's error if no rank
    has failed."""
    listed = reports.reported(folder)
    reporting = {failure.rank for failure in listed}
    for child in _child_failures(error):
        for rank, process in child.items():
            if rank not in reporting:
                # The timestamp is in whole seconds; torchelastic may have taken 30 s to end the other ranks
                # since.
                seen = min(time.time(), process.timestamp + 1.0)
                listed.append(reports.of_exit(process.exitcode, rank).model_copy(update={"time": seen}))
    return listed or [reports.of_error(error, first_rank())]


def _child_failures(error: BaseException) -> Iterator[dict[int, Any]]:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for link in (error, getattr(error, "value", None), error.__context__):
        if isinstance(link, ChildFailedError):
            yield link.failures
            return


def unreported() -> Preempted:
    """Return the error of ranks that a SIGTERM has ended before they could report."""
    return Preempted(
        "the pod got SIGTERM, and the ranks were ended before they could say what they have saved",
        goes_on=True,
    )


def first_rank() -> int:
    """Return the rank that names a node in errors of the process that starts its ranks."""
    return int(os.environ.get("PET_NODE_RANK", "0"))
