"""Errors that a person must correct, as the lines of a terminal."""

import os

from flytune import addresses
from flytune.errors import printable


def show(error: Exception) -> int:
    """Print an error on stderr; return the exit code for it."""
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    try:
        console.print(printable(f"{type(error).__name__}: {addresses.redact(str(error))}"), markup=False)
        console.file.flush()
    except OSError:  # a full disk takes no message either; the exit code remains
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return 1
