"""Garbage collection in processes that import large libraries, whose objects live as long as the process.

torch, transformers and TRL make more than a million objects. Python's collector goes through all of them
several times while they are imported, and again when the process ends, and frees next to nothing.
"""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Import libraries without garbage collection; later collections pass over the objects that exist at the
    end."""
    was_enabled, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        # Once for each library: what is garbage at that moment stays.
        if len(sys.modules) > modules:
            gc.freeze()


def skip_at_exit() -> None:
    """End this process without a last collection; the system frees its memory."""
    atexit.register(gc.freeze)
