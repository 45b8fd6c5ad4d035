"""Functions that kill their own process, as a lost machine does, or wait. Imports little, because new
processes import it."""

import os
import signal
import time
from pathlib import Path

from tests.support.waiting import LIMIT, until


def kill_once_saved(recipe, step):
    """Kill this rank once the checkpoint of that step, which is stored asynchronously, is complete."""
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(recipe.checkpoints.address)
    until(lambda: filesystem.invalidate_cache() or filesystem.glob(f"{root}/*/{step}-*/manifest.json"))
    os.kill(os.getpid(), signal.SIGKILL)


def end_at_once(*arguments):
    """End this process without an error message."""
    os._exit(9)


def in_which_process(*arguments):
    return os.getpid()


def note_and_wait(file):
    """Write the number of this process into a new file, and go on for longer than a test waits."""
    partial = Path(f"{file}.partial")
    partial.write_text(str(os.getpid()))
    partial.rename(file)
    time.sleep(2 * LIMIT)
