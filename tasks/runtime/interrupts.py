"""Ctrl-C in a local run: what is saved, and what the same command does next."""

import contextlib
import multiprocessing
import os
from typing import Any, NoReturn

from flytekit import FlyteContextManager

from flytune.recipe import Recipe
from flytune.stages.stored import show_saved
from tasks.runtime.orchestrator import FLYTE

EXIT_CODE = 130
"""128 and the number of SIGINT, as in a shell."""


class _State:
    """Recipe of the run or of the sweep's point that this process works on."""

    recipe: Recipe | None = None


def note(recipe: Recipe) -> None:
    """Note the recipe that this process works on; do nothing in pods and ranks, which get no Ctrl-C of their
    own."""
    if FLYTE.is_local() and "RANK" not in os.environ:
        _State.recipe = recipe


def install() -> None:
    """Make flytekit's handler of SIGINT, which ends the process without a word, call `stop`."""
    FlyteContextManager.add_signal_handler(stop)


def stop(*_: Any) -> NoReturn:
    """Say what is saved, end this process's workers, and leave.

    Raises:
        SystemExit: always.
    """
    if (recipe := _State.recipe) is not None:
        _State.recipe = None
        show_saved(FLYTE, recipe, "Ctrl-C")
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            child.kill()
    raise SystemExit(EXIT_CODE)
