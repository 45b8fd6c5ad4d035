"""Stages of a local run, in a worker process of this machine, and what a signal makes of them."""

import asyncio
import atexit
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from flytune.recipe import Recipe
from flytune.stages.calls import Call, StageResult
from flytune.stages.stored import saved_sentence
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


async def made(call: Call) -> StageResult:
    """Return what a stage makes in the worker, which runs one stage at a time."""
    _State.call = call
    if isinstance(recipe := call.inputs.get("recipe"), Recipe):
        _State.recipe = recipe
    found: StageResult = await asyncio.to_thread(WORKER.call, call.run)
    return found


def install() -> None:
    """Make Ctrl-C and SIGTERM end a local run of `flyte run` with what is saved, and how to go on; do nothing elsewhere."""
    if Path(sys.argv[0]).name == "flyte" and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _end)


def _end(number: int, frame: Any) -> None:
    """Let the worker save, say what is saved, and leave.

    Raises:
        SystemExit: always, but at a further signal, which the worker gets too.
    """
    call, recipe = _State.call, _State.recipe
    if _State.is_ending:
        return
    _State.is_ending = True
    # A terminal sends Ctrl-C to the worker, too.
    WORKER.stop(None if number == signal.SIGINT else number)
    # The worker says it at a Ctrl-C in a stage with a recipe.
    if call is not None and recipe is not None and (number != signal.SIGINT or call.inputs.get("recipe") is not recipe):
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        # A print may be what the signal has interrupted; its stream cannot be entered again.
        os.write(2, f"\n{recipe.name}: {name}: {saved_sentence(call.orchestrator, recipe)}\n".encode())
    raise SystemExit(128 + number)
