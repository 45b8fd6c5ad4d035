"""Ends processes as a machine that is taken away does. Imports little: a process that is started anew imports it."""

import os
import signal
import time


def kill_once_saved(recipe, step):
    """Kills this rank, once the checkpoint of that step is whole: it is stored beside training."""
    import fsspec

    deadline = time.monotonic() + 120
    filesystem, root = fsspec.core.url_to_fs(recipe.checkpoints.address)
    while not filesystem.glob(f"{root}/*/{step}-*/manifest.json"):
        assert time.monotonic() < deadline, f"no checkpoint of step {step}"
        time.sleep(0.05)
        filesystem.invalidate_cache()
    os.kill(os.getpid(), signal.SIGKILL)


def end_at_once(*arguments):
    """Ends this process without a word."""
    os._exit(9)


def in_which_process(*arguments):
    return os.getpid()
