"""Runner of ranks as processes, and stand-ins for parts of a run of one process."""

import os
from types import SimpleNamespace

from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.selftest import RankFailed, processes
from flytune.training import loop

__all__ = ["ALONE", "NOTHING_SAVED", "RankFailed", "fit", "run"]

processes.TIMEOUT = 900
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))


def run(world_size, function, *arguments, **named):
    """Call a function in processes, as flytune.selftest does, each with the threads of OMP_NUM_THREADS."""
    return processes.run(world_size, _threaded, function, *arguments, **named)


def fit(recipe, dataset, out):
    """Train the rank of a recipe for 64 samples."""
    plan = planner.make(recipe, samples=64)
    return loop.fit(recipe, plan, shape_named(plan.shape), dataset, out)


def _threaded(function, *arguments):
    if THREADS > 1:  # tests/conftest.py has set 1 in the process that was forked
        import torch

        torch.set_num_threads(THREADS)
    return function(*arguments)


ALONE = SimpleNamespace(world_size=1, process_index=0, device="cpu")
"""Stand-in for the training arguments of one process on a CPU."""
NOTHING_SAVED = SimpleNamespace(saved_step=0, store_seconds=0.0, resumed_seconds=0.0)
"""Stand-in for a Saver without a checkpoint."""
