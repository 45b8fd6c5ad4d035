"""Termination of the pods of a job: a pod without rank 0 waits for rank 0's, and stores neither outputs nor
an error."""

import os
import signal
from typing import NoReturn

import flyte

from flyte2.runtime.file_systems import fsspec_s_own
from flytune.stages import job_end
from flytune.storage import Storage


def end_after_rank_0(size: int) -> NoReturn:
    """Wait until rank 0's pod has stored `size` bytes and exited; then end this process.

    Raises:
        StorageError: nothing was stored in the time that the size allows.
    """
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    job_end.wait_for_outputs(_names, signals, size)
    # The SDK would store what a task returns.
    os._exit(0)


def leave_to_another() -> None:
    """End this process if another pod of the job reports the cause of a failure, whose consequence this pod's
    is."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if job_end.another_pod_reports(_names):
        os._exit(1)


def _names() -> set[str]:
    """Return the names of the files that the pods of this attempt have stored for Flyte."""
    with fsspec_s_own():
        return {name.rpartition("/")[2] for name in Storage(flyte.ctx().output_path, "").sizes("")}
