"""Limit on the size of this process's files, in place of a full disk: both end a write with an error."""

import resource
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size):
    """Let no file grow beyond `size` bytes in the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
