"""Waiting for an event of a test: the limit is far away, so that no verdict depends on the load of the
machine."""

import time
from collections.abc import Callable

LIMIT = 600.0
"""Seconds after which what a test waits for has failed."""


def until(happens: Callable[[], object], what: str = "") -> None:
    """Return when `happens()` is true.

    Raises:
        AssertionError: it is not within LIMIT.
    """
    end = time.monotonic() + LIMIT
    while not happens():
        assert time.monotonic() < end, f"not within {LIMIT:.0f} s: {what or happens}"
        time.sleep(0.01)
