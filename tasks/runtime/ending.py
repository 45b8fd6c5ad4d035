"""The end of a pod: what it has computed is stored before it goes, and the pods of a job end in the order that keeps it.

Kubeflow's training operator calls an elastic job succeeded as soon as one of its pods has exited 0, and ends the others; Flyte
looks for outputs.pb at that moment. So rank 0's pod has to be the first.
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
"""Seconds that a pod without rank 0 outlives the outputs, unless the operator ends it before: rank 0's pod has yet to exit."""
SLOWEST_UPLOAD = 4e6
"""Rate of the slowest upload that is waited for, in bytes a second."""
SECONDS_TO_BEGIN = 1800.0
"""Seconds allowed to an upload of any size, besides the time for its bytes."""
SECONDS_FOR_THE_CAUSE = 40.0
"""Seconds that a pod with a lost peer waits for another's error: torchelastic gives that one's ranks 30 s before it reports."""
SECONDS_BETWEEN_LOOKS = 1.0


def storing(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a task's `execute`, after which SIGTERM does not end the pod: flytekit stores what it returned or raised.

    torchelastic's handler raises in the main thread, whatever runs there, and flytekit calls an error within an upload final.
    """

    def run(**inputs: Any) -> Any:
        try:
            return execute(**inputs)
        finally:
            outlive_sigterm()

    return run


def outlive_sigterm() -> None:
    """Let this pod end only by itself or by SIGKILL from here on; a process of a local run stays as it is."""
    _on_sigterm(signal.SIG_IGN)


def _on_sigterm(handler: Any) -> None:
    state = FlyteContextManager.current_context().execution_state
    in_pod = state is not None and state.mode == ExecutionState.Mode.TASK_EXECUTION
    if in_pod and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def wait_for_outputs(size: int) -> None:
    """Wait, in a pod without rank 0 whose ranks have ended, until rank 0's pod has stored outputs or an error, and exited.

    SIGTERM is noted: the operator sends it when rank 0's pod has exited. Where it comes before, because a node is drained, this
    pod is killed while it waits, and so has failed.

    Args:
        size: bytes that rank 0's pod uploads; they bound the wait.

    Raises:
        StorageError: nothing was stored in that time.
    """
    signals: list[int] = []
    _on_sigterm(lambda number, frame: signals.append(number))
    limit = SECONDS_TO_BEGIN + size / SLOWEST_UPLOAD
    began = time.monotonic()
    while not _ended():
        if time.monotonic() - began > limit:
            raise StorageError(f"rank 0's pod has stored no outputs within {limit:.0f} s of the end of training; see its log")
        time.sleep(SECONDS_BETWEEN_LOOKS)
    stored = time.monotonic()
    while not signals and time.monotonic() - stored < SECONDS_AFTER_OUTPUTS:
        time.sleep(SECONDS_BETWEEN_LOOKS)


def another_reports() -> bool:
    """Tell whether another pod of this job reports an error within the time that its cause may take to be reported."""
    outlive_sigterm()
    began = time.monotonic()
    while time.monotonic() - began < SECONDS_FOR_THE_CAUSE:
        if any(name.startswith("error") for name in _names()):
            return True
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return False


def _ended() -> bool:
    return any(name == OUTPUT_FILE_NAME or name.startswith("error") for name in _names())


def _names() -> set[str]:
    """List files that the pods of this attempt have handed to Flyte so far; none while the storage is away."""
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
        log.warning("%s: %s: %s; looking again", prefix, type(error).__name__, error)
        return set()


def close_file_systems() -> None:
    """Close the connections of all of fsspec's file systems, which stay open for the whole process; used again, they are new.

    flytekit's run on loops of its own, for which s3fs closes nothing: each process would end with "Unclosed client session".
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
            except Exception as error:  # noqa: BLE001 (a rank would exit with 1, and its finished run would fail)
                log.debug("a connection was not closed: %s: %s", type(error).__name__, error)
        kind.clear_instance_cache()


async def _close(files: Any) -> None:
    """Close what s3fs, gcsfs or fsspec's HTTP file system talk through."""
    for name in ("_s3creator", "_session"):
        if (session := getattr(files, name, None)) is not None:
            await session.__aexit__(None, None, None)
