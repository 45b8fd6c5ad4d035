"""Ranks forked from the process that starts them, which has imported their libraries and fetched their inputs."""

import atexit
import contextvars
import functools
import gc
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flytekit.interfaces.random import random

from flytune.hardware import shape_named
from flytune.models import clean_process
from flytune.recipe import Recipe
from flytune.records import Plan
from flytune.training import libraries
from tasks.runtime.directories import is_local

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def prepare(fetch: Callable[..., Any], recipe: Recipe, plan: Plan, **inputs: Any) -> bool:
    """Import what training needs while `fetch` gets the inputs; return True if the ranks can be forked from this process.

    Errors of `fetch` are left to the ranks, which call it again and report them. In a local run, the process that evaluates is
    forked as well.
    """
    if clean_process.has_computed():
        return False
    shape = shape_named(plan.shape)
    if not is_local() and shape.processes > 1:
        # As torchrun does it, but before torch is imported.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ThreadPoolExecutor(1) as executor:
        executor.submit(contextvars.copy_context().run, functools.partial(fetch, **inputs))
        libraries.import_before_fork(shape.is_gpu, [recipe.objective.name])
    if not libraries.can_fork():
        return False
    if is_local() and not shape.is_gpu:
        clean_process.fork()
    return True


def in_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a task for forked ranks: without the signal handlers and exit functions of the parent."""

    @functools.wraps(function)
    def run(**inputs: Any) -> Any:
        import torch

        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Otherwise each garbage collection goes through the objects of the parent, and copies their pages.
        gc.freeze()
        # flytekit's generator, which names folders: ranks would draw the same names.
        random.seed()
        # In a local run the parent has loaded torch with more threads.
        # OpenMP's variable may be a list, of which the first number counts here; it ignores what it cannot read.
        threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else torch.get_num_threads())
        atexit._clear()
        try:
            return function(**inputs)
        finally:
            # A forked process ends without it; trackers finish their runs here.
            atexit._run_exitfuncs()

    return run
