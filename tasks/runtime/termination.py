"""Termination of pods and of local runs: results are stored before a pod exits, the pods of a job exit in an
order that keeps its result, and a Ctrl-C says what is saved."""

import logging
import os
import signal
import sys
import threading
import time
from typing import Any

from flytekit import FlyteContextManager, current_context
from flytekit.core.base_task import IgnoreOutputs
from flytekit.core.context_manager import ExecutionState
from flytekit.utils.asyn import run_sync

from flytune import storage
from flytune.recipe import Recipe
from flytune.stages import calls, job_end
from flytune.stages.ranks import NoResult, StageFailed
from tasks.runtime.orchestrator import FLYTE

log = logging.getLogger(__name__)


class _State:
    """Recipe of the run or of the sweep's point that this process works on."""

    recipe: Recipe | None = None


def note(recipe: Recipe | None) -> None:
    """Note the recipe of a stage of a local run, for a Ctrl-C."""
    if recipe is not None and FLYTE.is_local():
        _State.recipe = recipe


def end_at_ctrl_c() -> None:
    """Make flytekit's handler of SIGINT, which ends the process without a word, say what is saved."""
    FlyteContextManager.add_signal_handler(_end)


def _end(*_: Any) -> None:
    recipe, _State.recipe = _State.recipe, None
    calls.end_interrupted(FLYTE, recipe)


def ignore_sigterm() -> None:
    """Ignore SIGTERM in this pod from now on; do nothing in a local run."""
    _on_sigterm(signal.SIG_IGN)


def _on_sigterm(handler: Any) -> None:
    state = FlyteContextManager.current_context().execution_state
    in_pod = state is not None and state.mode == ExecutionState.Mode.TASK_EXECUTION
    if in_pod and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def run(call: calls.Call, pages: list[str]) -> Any:
    """Return what a stage makes in this pod, which may be one of several.

    Raises:
        IgnoreOutputs: another pod of the job has the result, or the cause of the failure.
        StageFailed: a rank has failed.
    """
    try:
        return call.run(pages).value
    except NoResult:
        ignore_sigterm()
        plan = call.inputs.get("plan")
        # Exported parameters have four bytes at most.
        wait_for_outputs(4 * plan.trained_parameters if plan else 0)
        raise IgnoreOutputs from None
    except StageFailed as error:
        ignore_sigterm()
        if not error.failure.notices or call.shape is None or call.shape.nodes == 1:
            raise
        if another_pod_reports():
            raise IgnoreOutputs from None
        # Flyte shows the earliest error; a cause that another pod reports after this one must be earlier.
        raise StageFailed(error.failure.model_copy(update={"time": time.time()})) from None


def wait_for_outputs(size: int) -> None:
    """Wait, in a pod without rank 0 whose ranks have ended, until rank 0's pod has stored `size` bytes, and
    exited.

    Raises:
        StorageError: nothing was stored in the time that the size allows.
    """
    signals: list[int] = []
    _on_sigterm(lambda number, frame: signals.append(number))
    job_end.wait_for_outputs(_names, signals, size)


def another_pod_reports() -> bool:
    """Return True if another pod of this job reports an error soon."""
    ignore_sigterm()
    return job_end.another_pod_reports(_names)


def _names() -> set[str]:
    """Return the names of files that the pods of this attempt have stored for Flyte; none while the storage
    is unreachable."""
    prefix = str(current_context().output_metadata_prefix)
    try:
        files = FlyteContextManager.current_context().file_access.get_filesystem_for_path(prefix)
        files.invalidate_cache()
        return {os.path.basename(str(path)) for path in files.ls(prefix, detail=False)}
    except FileNotFoundError:
        return set()
    except Exception as error:  # each file system has errors of its own
        if storage.failure(error) is None:
            raise
        log.warning("%s: %s: %s; trying again", prefix, type(error).__name__, error)
        return set()


def close_file_systems() -> None:
    """Close the connections of all of fsspec's file systems; a file system that is used again opens new ones.

    flytekit's file systems run on its own event loops, for which s3fs closes nothing: without this, each
    process ends with "Unclosed client session".
    """
    if (asyn := sys.modules.get("fsspec.asyn")) is None:
        return
    kinds = [asyn.AsyncFileSystem]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for files in [file_system for file_system in kind._cache.values() if file_system._pid == os.getpid()]:
            try:
                if files.asynchronous:  # flytekit's
                    run_sync(_close, files)
                else:
                    asyn.sync(files.loop, _close, files, timeout=5)
            except Exception as error:  # noqa: BLE001 (raised, it would fail a finished run: the rank would exit with 1)
                log.debug("a connection was not closed: %s: %s", type(error).__name__, error)
        kind.clear_instance_cache()


def close_local_cache() -> None:
    """Close the database of flytekit's cache of local runs, which flytekit does not: its journal becomes part
    of the file."""
    module = sys.modules.get("flytekit.core.local_cache")
    if module is not None and module.LocalTaskCache._initialized:
        module.LocalTaskCache._cache.close()


async def _close(files: Any) -> None:
    """Close the client session of s3fs, gcsfs or fsspec's HTTP file system."""
    for name in ("_s3creator", "_session"):
        if (session := getattr(files, name, None)) is not None:
            await session.__aexit__(None, None, None)
