"""Set-up of a process before heavy libraries are imported: variables that launchers have left, the garbage
collector, and handlers of signals.

A recipe decides launcher, device, precision and compiler. The variables are those that torch 2.13, accelerate
1.15, transformers 5.23 and DeepSpeed 0.19 read.

torch, transformers and TRL make more than a million objects, which live as long as the process. Python's
collector goes through all of them several times while they are imported, and again when the process ends, and
frees next to nothing.
"""

import atexit
import functools
import gc
import itertools
import logging
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from flytune.errors import LaunchError

log = logging.getLogger(__name__)

_RANKS = (
    "RANK",
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "SLURM_PROCID",
)
"""Number of a process at each launcher; 0 is that of the first one."""
_OF_OPERATOR = r"PET_\w+"
"""torchrun's options, which the training operator sets in the pods of a job."""
_TABLE = {
    "a launcher": (
        r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|LOCAL_SIZE|NODE_RANK|MASTER_(ADDR|PORT)|FORK_LAUNCHED",
        r"TORCHELASTIC_(RUN_ID|USE_AGENT_STORE|ERROR_FILE|RESTART_COUNT|MAX_RESTARTS|SIGNALS_TO_HANDLE)",
        r"TORCH_ELASTIC_WORKER_IDENTICAL|TORCH_DISTRIBUTED_(USE_TORCHCOMMS|COMPILE_ON_ONE_RANK)|TORCH_DIST_INIT_BARRIER",
        r"(OMPI_COMM_WORLD|MV2_COMM_WORLD|PMI|PMIX)_(LOCAL_)?(RANK|SIZE)|MPI_LOCAL(RANKID|NRANKS)",
        r"AZUREML_EXPERIMENT_ID|AZ_BATCH_MASTER_NODE|AZ_BATCHAI_MPI_MASTER_NODE|DLTS_JOB_ID",
        r"SM_TRAINING_ENV|SM_HP_MP_PARAMETERS|SM_FRAMEWORK_PARAMS|SMDATAPARALLEL_LOCAL_RANK",
        _OF_OPERATOR,
    ),
    "accelerate or DeepSpeed": (
        r"ACCELERATE_(?!LOG_LEVEL$|ENABLE_RICH$)\w+",
        r"(FSDP|DEEPSPEED|MEGATRON_LM|PARALLELISM_CONFIG|FP8)_\w+|DS_ALLOW_DEPRECATED_FP16",
    ),
    "a device": (r"PJRT_DEVICE|USE_TORCH_XLA|TPU_NAME|PT_HPU_LAZY_MODE",),
    "a precision": (
        r"NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|(ONEDNN|DNNL)_DEFAULT_FPMATH_MODE",
        r"XLA_USE_BF16|XLA_DOWNCAST_BF16",
    ),
    "a compiler": (
        r"TORCHDYNAMO_(DISABLE|SUPPRESS_ERRORS|CAPTURE_\w+|PREPARE_FREEZING|ENABLE_P2P_COMPILATION)",
        r"TORCH_COMPILE_(DISABLE|OVERRIDE_\w+|BACKEND|MODE)|TORCH_COMPILER_COLLECTIVES|TORCH_DYNAMO_AUTOMATIC_\w+",
    ),
}
"""Patterns of names, by what the variables choose."""


AGAIN_SECONDS = 0.02
"""Seconds after which a signal that has interrupted logging is sent again."""
_WRITERS = ("emit", "flush")
"""Functions of logging that hold a lock within a `try`, and may wait for a reader of the output."""

Handler = Callable[[int, FrameType | None], Any]


def clear(*, in_pod: bool) -> None:
    """Remove the variables of the table from this process's environment, and say which; call it before torch
    is imported.

    A pod keeps those that the training operator sets. Ranks, and other processes that this one has started,
    keep all.

    Raises:
        LaunchError: another launcher has started this command several times.
    """
    if multiprocessing.parent_process() is not None:
        return
    if not in_pod:
        _refuse_further_ranks()
    names_by_kind = {}
    for kind, patterns in _TABLE.items():
        removed = [pattern for pattern in patterns if not (in_pod and pattern == _OF_OPERATOR)]
        if names := _matching(removed):
            names_by_kind[kind] = names
    for name in itertools.chain.from_iterable(names_by_kind.values()):
        del os.environ[name]
    if names_by_kind:
        named = "; ".join(f"{', '.join(names)} (of {kind})" for kind, names in names_by_kind.items())
        log.warning("left out of the environment, because the recipe decides it: %s", named)


def use_accelerator(name: str) -> None:
    """Make DeepSpeed use a CPU, or what it finds; say so where the environment names another device."""
    if (left := os.environ.pop("DS_ACCELERATOR", name)) != name:
        log.warning("left out of the environment, because the recipe decides it: DS_ACCELERATOR=%s", left)
    if name == "cpu":
        os.environ["DS_ACCELERATOR"] = name


def _matching(patterns: list[str]) -> list[str]:
    return sorted(
        name for name in os.environ if any(re.fullmatch(pattern, name, re.ASCII) for pattern in patterns)
    )


def _refuse_further_ranks() -> None:
    for name in _RANKS:
        if re.fullmatch(r"0*[1-9]\d{0,8}", value := os.environ.get(name, ""), re.ASCII):
            raise LaunchError(
                f"{name}={value}: another launcher (torchrun, accelerate launch, mpirun, srun) has started "
                "this command several times; Flytune starts the ranks itself: start it once, without the "
                f"other one, or unset {name}"
            )


@contextmanager
def paused() -> Iterator[None]:
    """Import libraries without garbage collection; later collections pass over the objects that exist at the
    end."""
    was_enabled, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        # Once for each library: what is garbage at that moment stays.
        if len(sys.modules) > modules:
            gc.freeze()


def skip_at_exit() -> None:
    """End this process without a last collection; the system frees its memory."""
    atexit.register(gc.freeze)


def outside_logging(handler: Handler) -> Handler:
    """Return a handler that is not called where its exception would leave a lock of logging locked.

    Until Python 3.12 logging acquires its locks before the `try` that releases them. An exception between the
    two, which only the handler of a signal can raise there, would keep the lock: each other thread that logs
    would wait for ever, and so would a thread that joins it. A signal at such a place is sent again a moment
    later.
    """

    @functools.wraps(handler)
    def handle(number: int, frame: FrameType | None) -> Any:
        if _is_at_lock(frame):
            again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return None
        return handler(number, frame)

    return handle


def _is_at_lock(frame: FrameType | None) -> bool:
    if frame is None:
        return False
    code = frame.f_code
    return code.co_filename == logging.__file__ and code.co_name not in _WRITERS
