"""Times of imports and functions before the first optimizer step: sitecustomize of each Python that inherits
SPANS.

An import hook times modules of PACKAGES, and wraps functions of FUNCTIONS once their modules are loaded. It
appends to the file SPANS: process, parent, cause, start and end on the machine's monotonic clock. It imports
neither flytune nor third-party packages: it runs before everything else, and must take no time.
"""

import atexit
import functools
import importlib.abc
import json
import os
import sys
import time

PACKAGES = {
    **dict.fromkeys(
        ("flytekit", "flyteidl", "grpc", "google", "fsspec", "s3fs", "pydantic", "rich", "mashumaro"),
        "import flytekit",
    ),
    **dict.fromkeys(("flytune", "training_estimates", "tasks", "workflows", "images"), "import the project"),
    **dict.fromkeys(("flytekitplugins", "kubernetes"), "import kfpytorch, kubernetes"),
    "torch": "import torch",
    **dict.fromkeys(
        ("transformers", "trl", "peft", "accelerate", "deepspeed", "datasets", "bitsandbytes"),
        "import transformers, trl",
    ),
}
FUNCTIONS = {
    "flytekit.tools.fast_registration": {
        "download_distribution": "download the code",
        "fast_package": "pack the code",
    },
    "flytekit.remote.remote": {
        "FlyteRemote.upload_file": "upload the code",
        "FlyteRemote.register_workflow": "serialize and register",
        "FlyteRemote._execute": "submit",
    },
    "flytune.planning.planner": {"make": "plan"},
    "flytune.data.preparation": {"prepare": "prepare the data"},
    "flytune.stages.stored": {"local": "fetch the data set"},
    "flytune.models.loading": {"base_model": "load the model"},
    "flytune.sharding.base": {"ShardingBase.shard": "load the model"},
    "torch.distributed.distributed_c10d": {"init_process_group": "process group"},
    "flytune.training.loop": {"fit": "set up the Trainer"},
    "transformers.trainer": {
        "Trainer.get_batch_samples": "first batch",
        "Trainer.training_step": "first step",
    },
}
FIRST_STEP = ("transformers.trainer_callback", "CallbackHandler.on_step_end")

_spans: list[tuple[str, float, float]] = []


def note(cause: str, start: float) -> None:
    """Record a span that ends now."""
    _spans.append((cause, start, time.monotonic()))


def write() -> None:
    """Append the recorded spans, and the end of the process so far."""
    note("end", time.monotonic())
    lines = [json.dumps([os.getpid(), os.getppid(), *span]) + "\n" for span in _spans]
    _spans.clear()
    with open(os.environ["SPANS"], "a") as file:
        file.write("".join(lines))


def timed(cause: str, function):
    """Return a function that records its time."""

    @functools.wraps(function)
    def inner(*args, **kwargs):
        start = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            note(cause, start)

    return inner


def _first_step(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        if os.environ.get("RANK", "0") == "0":
            note("THE FIRST STEP", time.monotonic())
        write()
        return function(*args, **kwargs)

    return inner


def _wrap(module, path: str, wrapper) -> None:
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, module)
    setattr(owner, name, wrapper(getattr(owner, name)))


class Hook(importlib.abc.MetaPathFinder):
    """Import hook that times the execution of modules; spans of nested imports are inside of it."""

    def find_spec(self, name, path=None, target=None):
        """Return the spec of the other finders, with a loader that is timed."""
        cause = PACKAGES.get(name.partition(".")[0])
        wraps = dict(FUNCTIONS.get(name, {}))
        if cause is None and not wraps:
            return None
        spec = next(
            (
                found
                for finder in sys.meta_path
                if finder is not self and (found := _find(finder, name, path))
            ),
            None,
        )
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def timed_execute(module):
            start = time.monotonic()
            execute(module)
            for path, what in wraps.items():
                _wrap(module, path, functools.partial(timed, what))
            if name == FIRST_STEP[0]:
                _wrap(module, FIRST_STEP[1], _first_step)
            note(cause, start)

        spec.loader.exec_module = timed_execute
        return spec


def _find(finder, name, path):
    return finder.find_spec(name, path) if hasattr(finder, "find_spec") else None


def begin() -> None:
    """Install the hook; the time until now is the interpreter's start."""
    with open("/proc/self/stat") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    born = ticks / os.sysconf("SC_CLK_TCK") + time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)
    note("start Python", born)
    sys.meta_path.insert(0, Hook())
    atexit.register(write)
    os.register_at_fork(after_in_child=_begin_in_fork)


def _begin_in_fork() -> None:
    """Leave the parent's spans to the parent; the first is of this process's own start."""
    _spans.clear()
    note("fork", time.monotonic())


if "SPANS" in os.environ:
    begin()
