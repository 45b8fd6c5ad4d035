"""Functions that kill their own process, as a lost machine does. Imports little, because new processes import it."""

import os
import signal
import time


def kill_once_saved(recipe, step):
    """Kill this rank once the checkpoint of that step, which is stored asynchronously, is complete."""
    import fsspec

    deadline = time.monotonic() + 120
    filesystem, root = fsspec.core.url_to_fs(recipe.checkpoints.address)
    while not filesystem.glob(f"{root}/*/{step}-*/manifest.json"):
        assert time.monotonic() < deadline, f"no checkpoint of step {step}"
        time.sleep(0.05)
        filesystem.invalidate_cache()
    os.kill(os.getpid(), signal.SIGKILL)


def end_at_once(*arguments):
    """End this process without an error message."""
    os._exit(9)


def in_which_process(*arguments):
    return os.getpid()
