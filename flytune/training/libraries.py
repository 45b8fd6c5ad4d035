"""Import of training's libraries before a fork: the forked processes do not import them again.

A process that has used CUDA cannot be forked, so nothing is computed here. bitsandbytes, which PEFT and TRL
import, uses CUDA itself: with GPUs, only libraries that do not import it are imported.
"""

import os
import sys
import warnings
from collections.abc import Iterable
from multiprocessing import get_context

from flytune import process_setup
from flytune.models import loading
from flytune.objectives import OBJECTIVES

_WITHOUT_GPU = (
    "torch.distributed.elastic.agent.server",
    "transformers.modeling_utils",
    "accelerate",
    "datasets",
)
_OTHERS = ("transformers.integrations.deepspeed", "deepspeed")


def import_before_fork(has_gpu: bool, objectives: Iterable[str]) -> None:
    """Import the libraries of training with the objectives; with a GPU, only those that do not use it."""
    names = list(_WITHOUT_GPU)
    if not has_gpu:
        process_setup.use_accelerator("cpu")
        names += _OTHERS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loading.import_libraries(*names)
        if not has_gpu:
            with loading.importing():
                for name in objectives:
                    OBJECTIVES[name].trainer_class()


def can_fork() -> bool:
    """Return True if a process forked from this one can compute: on Linux, where this one has not used
    CUDA or there is no GPU."""
    if sys.platform != "linux":
        return False
    if "torch" not in sys.modules:
        return True  # the process that looks would import it
    process = get_context("fork").Process(target=_exit_with_cuda_state)
    process.start()
    process.join()
    return process.exitcode == 0


def _exit_with_cuda_state() -> None:
    import torch

    # torch sets it in the child where the parent has asked CUDA for anything, even for the number of devices,
    # as torch's CUDA build does at its import on a machine without one.
    os._exit(int(torch.cuda._is_in_bad_fork() and torch.cuda.device_count() > 0))
