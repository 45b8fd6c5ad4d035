"""Process without leftovers of training: evaluation in a local run, where one process does all stages.

It is forked before this process computes, so that it imports nothing again; otherwise it is a new
interpreter.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from flytune.errors import ExportError

_T = TypeVar("_T")
_PR_SET_PDEATHSIG = 1
"""Option of prctl (Linux's sys/prctl.h)."""


class _State:
    """Kinds of work that this process has done, and its clean process."""

    has_computed = has_trained = False
    pool: ProcessPoolExecutor | None = None


def note_training() -> None:
    """Note that this process trains from now on; free a GPU's memory with which it has computed before."""
    _free_gpu_memory()
    _State.has_computed = _State.has_trained = True


def has_computed() -> bool:
    """Return True if this process has trained or evaluated: its threads would be missing in a forked
    process."""
    return _State.has_computed


def fork() -> None:
    """Fork the process in which `run` calls functions; do nothing if there is one, or this process has
    computed."""
    if _State.pool is None and not _State.has_computed:
        _State.pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("fork"), initializer=_end_with_parent
        )
        _State.pool.submit(gc.freeze).result()


def run(function: Callable[..., _T], *arguments: Any) -> _T:
    """Return the result of `function`: from the forked process, or from a new one if this one has trained,
    else from this one.

    A pod never trains before it evaluates; a local run does both.

    Raises:
        ExportError: the other process was killed.
    """
    if _State.pool is None and not _State.has_trained:
        _State.has_computed = True
        try:
            return function(*arguments)
        finally:
            # The next stage of a local run trains in other processes, or in this one.
            _free_gpu_memory()
    try:
        if _State.pool is not None:
            return _State.pool.submit(function, *arguments).result()
        free_memory()
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn, initializer=_end_with_parent) as pool:
            return pool.submit(function, *arguments).result()
    except BrokenProcessPool:
        _State.pool = None
        # The next one is a new interpreter.
        note_training()
        raise ExportError(
            "the process that evaluates ended without an error message, usually because host memory ran out; "
            "nothing was stored"
        ) from None


def _free_gpu_memory() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        free_memory()


def free_memory() -> None:
    """Free what this process has computed with, and what torch caches of a GPU's memory, which no other
    process can use."""
    # A library that was imported while a trainer existed has had the collector pass over it
    # (flytune/process_setup.py).
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if (torch := sys.modules.get("torch")) is not None:
        torch.cuda.empty_cache()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Of a Ctrl-C, which this process gets too, the parent speaks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _forget_pool() -> None:
    # Its threads run in the parent only: a forked process would wait for them without end.
    _State.pool = None


os.register_at_fork(after_in_child=_forget_pool)
