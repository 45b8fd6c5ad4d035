"""End of a job of several pods: they end in an order that keeps its result and its cause.

Kubeflow's training operator calls an elastic job succeeded as soon as one of its pods has exited 0, and ends
the others; Flyte looks for outputs.pb at that moment. Therefore rank 0's pod has to exit first.
"""

import time
from collections.abc import Callable, Sequence

from flytune.errors import StorageError

OUTPUTS = "outputs.pb"
"""File that Flyte's SDKs store a task's outputs in; those of errors begin with `error`."""
SECONDS_AFTER_OUTPUTS = 60.0
"""Seconds that a pod without rank 0 waits for rank 0's pod to exit once outputs are stored; the operator may
end it earlier."""
SLOWEST_UPLOAD = 4e6
"""Rate of the slowest upload that a pod waits for, in bytes a second."""
SECONDS_BEFORE_UPLOAD = 1800.0
"""Seconds allowed for an upload of any size, in addition to the time for its bytes."""
SECONDS_FOR_CAUSE = 40.0
"""Seconds that a pod with a lost peer waits for another pod's error, which torchelastic reports up to 30 s
later."""
POLL_SECONDS = 1.0

Names = Callable[[], set[str]]
"""Function that returns the names of files that the pods of this attempt have stored for Flyte."""


def wait_for_outputs(names: Names, signals: Sequence[int], size: int) -> None:
    """Wait, in a pod without rank 0 whose ranks have ended, until rank 0's pod has stored outputs or an
    error, and exited.

    The wait ends with SIGTERM, which the operator sends once rank 0's pod has exited. If SIGTERM comes before
    the outputs, because a node is drained, the pod is killed while it waits, and so fails.

    Args:
        signals: filled by the caller's handler of SIGTERM.
        size: bytes that rank 0's pod uploads; they bound the wait.

    Raises:
        StorageError: nothing was stored in that time.
    """
    limit = SECONDS_BEFORE_UPLOAD + size / SLOWEST_UPLOAD
    began = time.monotonic()
    while not any(name == OUTPUTS or name.startswith("error") for name in names()):
        if time.monotonic() - began > limit:
            raise StorageError(
                f"rank 0's pod has stored no outputs within {limit:.0f} s of the end of training; see its log"
            )
        time.sleep(POLL_SECONDS)
    stored = time.monotonic()
    while not signals and time.monotonic() - stored < SECONDS_AFTER_OUTPUTS:
        time.sleep(POLL_SECONDS)


def another_pod_reports(names: Names) -> bool:
    """Return True if another pod of this job reports an error within SECONDS_FOR_CAUSE."""
    began = time.monotonic()
    while time.monotonic() - began < SECONDS_FOR_CAUSE:
        if any(name.startswith("error") for name in names()):
            return True
        time.sleep(POLL_SECONDS)
    return False
