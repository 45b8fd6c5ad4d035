"""Stages of a local run, in a worker process of this machine, and what a signal makes of them."""

import asyncio
import atexit
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from flytune import process_setup
from flytune.recipe import Recipe
from flytune.stages.calls import Call, StageResult, leave
from flytune.stages.worker import Worker

WORKER = Worker()
atexit.register(WORKER.end)


class _State:
    """State of the local run, for the handler of signals."""

    call: Call | None = None
    """The call in the worker, or the one before."""
    recipe: Recipe | None = None
    """Newest recipe of a call."""
    is_ending = False


async def run(call: Call) -> StageResult:
    """Return what a stage makes in the worker, which runs one stage at a time."""
    _State.call = call
    recipe = call.inputs.get("recipe")
    if isinstance(recipe, Recipe):
        _State.recipe = recipe
    result: StageResult = await asyncio.to_thread(WORKER.call, call.run)
    return result


def install() -> None:
    """Make Ctrl-C and SIGTERM end a local run of `flyte run` with what is saved, and how to go on; do nothing
    elsewhere."""
    if Path(sys.argv[0]).name == "flyte" and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, process_setup.outside_logging(_end))


def _end(number: int, frame: Any) -> None:
    """Let the worker save, say what is saved, and leave.

    Raises:
        SystemExit: always, but at a further signal, which the worker gets too.
    """
    call, recipe = _State.call, _State.recipe
    if _State.is_ending:
        return
    _State.is_ending = True
    if call is None:
        WORKER.stop(None if number == signal.SIGINT else number)
        raise SystemExit(128 + number)
    leave(
        WORKER, number, call.orchestrator, recipe, recipe is not None and call.inputs.get("recipe") is recipe
    )
