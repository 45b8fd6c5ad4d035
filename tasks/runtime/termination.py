"""Termination of pods: results are stored before a pod exits, and the pods of a job exit in an order that keeps its result.

Kubeflow's training operator calls an elastic job succeeded as soon as one of its pods has exited 0, and ends the others; Flyte
looks for outputs.pb at that moment. Therefore rank 0's pod has to exit first.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from flytekit import FlyteContextManager, current_context
from flytekit.core.constants import OUTPUT_FILE_NAME
from flytekit.core.context_manager import ExecutionState
from flytekit.utils.asyn import run_sync

from flytune import storage
from flytune.errors import StorageError

log = logging.getLogger(__name__)

SECONDS_AFTER_OUTPUTS = 60.0
"""Seconds that a pod without rank 0 waits for rank 0's pod to exit once outputs are stored; the operator may end it earlier."""
SLOWEST_UPLOAD = 4e6
"""Rate of the slowest upload that a pod waits for, in bytes a second."""
SECONDS_BEFORE_UPLOAD = 1800.0
"""Seconds allowed for an upload of any size, in addition to the time for its bytes."""
SECONDS_FOR_CAUSE = 40.0
"""Seconds that a pod with a lost peer waits for another pod's error, which torchelastic reports up to 30 s later."""
POLL_SECONDS = 1.0


def ignoring_sigterm_after(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a task's `execute`, after which the pod ignores SIGTERM while flytekit stores the result or the error.

    torchelastic's handler raises in the main thread whatever runs there, and flytekit treats an error in an upload as final.
    """

    def run(**inputs: Any) -> Any:
        try:
            return execute(**inputs)
        finally:
            ignore_sigterm()

    return run


def ignore_sigterm() -> None:
    """Ignore SIGTERM in this pod from now on; do nothing in a local run."""
    _on_sigterm(signal.SIG_IGN)


def _on_sigterm(handler: Any) -> None:
    state = FlyteContextManager.current_context().execution_state
    in_pod = state is not None and state.mode == ExecutionState.Mode.TASK_EXECUTION
    if in_pod and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def wait_for_outputs(size: int) -> None:
    """Wait, in a pod without rank 0 whose ranks have ended, until rank 0's pod has stored outputs or an error, and exited.

    The wait ends with SIGTERM, which the operator sends once rank 0's pod has exited. If SIGTERM comes before the outputs,
    because a node is drained, the pod is killed while it waits, and so fails.

    Args:
        size: bytes that rank 0's pod uploads; they bound the wait.

    Raises:
        StorageError: nothing was stored in that time.
    """
    signals: list[int] = []
    _on_sigterm(lambda number, frame: signals.append(number))
    limit = SECONDS_BEFORE_UPLOAD + size / SLOWEST_UPLOAD
    began = time.monotonic()
    while not _has_ended():
        if time.monotonic() - began > limit:
            raise StorageError(f"rank 0's pod has stored no outputs within {limit:.0f} s of the end of training; see its log")
        time.sleep(POLL_SECONDS)
    stored = time.monotonic()
    while not signals and time.monotonic() - stored < SECONDS_AFTER_OUTPUTS:
        time.sleep(POLL_SECONDS)


def another_pod_reports() -> bool:
    """Return True if another pod of this job reports an error within SECONDS_FOR_CAUSE."""
    ignore_sigterm()
    began = time.monotonic()
    while time.monotonic() - began < SECONDS_FOR_CAUSE:
        if any(name.startswith("error") for name in _names()):
            return True
        time.sleep(POLL_SECONDS)
    return False


def _has_ended() -> bool:
    return any(name == OUTPUT_FILE_NAME or name.startswith("error") for name in _names())


def _names() -> set[str]:
    """Return the names of files that the pods of this attempt have stored for Flyte; none while the storage is unreachable."""
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

    flytekit's file systems run on its own event loops, for which s3fs closes nothing: without this, each process ends with
    "Unclosed client session".
    """
    if (asyn := sys.modules.get("fsspec.asyn")) is None:
        return
    kinds = [asyn.AsyncFileSystem]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for files in [one for one in kind._cache.values() if one._pid == os.getpid()]:
            try:
                if files.asynchronous:  # flytekit's
                    run_sync(_close, files)
                else:
                    asyn.sync(files.loop, _close, files, timeout=5)
            except Exception as error:  # noqa: BLE001 (raised, it would fail a finished run: the rank would exit with 1)
                log.debug("a connection was not closed: %s: %s", type(error).__name__, error)
        kind.clear_instance_cache()


def close_local_cache() -> None:
    """Close the database of flytekit's cache of local runs, which flytekit does not: its journal becomes part of the file."""
    module = sys.modules.get("flytekit.core.local_cache")
    if module is not None and module.LocalTaskCache._initialized:
        module.LocalTaskCache._cache.close()


async def _close(files: Any) -> None:
    """Close the client session of s3fs, gcsfs or fsspec's HTTP file system."""
    for name in ("_s3creator", "_session"):
        if (session := getattr(files, name, None)) is not None:
            await session.__aexit__(None, None, None)
