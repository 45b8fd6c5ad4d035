"""Rows for this machine, for runs on its own GPUs or CPUs, and rows by their names."""

import os
import re
import shutil
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path

from flytune.errors import RecipeError
from flytune.hardware.accelerators import load_accelerators
from flytune.hardware.devices import AMPERE, MEMORY_TOLERANCE
from flytune.hardware.shapes import GIB, SHAPES_FILE, Shape, load_shapes
from flytune.sentences import counted

NAME = "this-machine"
"""Name of this machine's row: of its GPUs; where it has none, of its CPUs."""
CPU_NAME = "this-machine-cpu"
"""Name of the row of its CPUs, where it has GPUs."""
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")
_SECONDS = 20.0


def row(name: str | None = None) -> Shape | None:
    """Return this machine's row, with a price of 0; None if it has no GPU, or several kinds.

    Read from the driver's program, which starts no CUDA: a process that has started CUDA cannot be forked. Of
    the GPUs that CUDA_VISIBLE_DEVICES names, if it is set.

    Args:
        name: of the row; by default the accelerator's and the number of GPUs.
    """
    gpus = _gpus()
    if len({gpu[0] for gpu in gpus}) != 1:
        return None
    kind = accelerator_of(gpus[0][0])
    memory = memory_gib()
    return Shape(
        name=name or f"{re.sub('[^a-z0-9]+', '-', kind.lower()).strip('-')}-{len(gpus)}",
        accelerator=kind,
        processes=len(gpus),
        gpu_memory_gib=round(min(gpu[1] for gpu in gpus), 1),
        bf16=all(gpu[2] >= AMPERE for gpu in gpus),
        cpu=os.cpu_count() or 1,
        memory_gib=memory,
        shared_memory_gib=max(1, min(memory - 1, int(_size("/dev/shm") / GIB))),
        disk_gib=_free_disk_gib(),
        price_per_hour=0.0,
    )


@cache
def rows() -> tuple[Shape, ...]:
    """Return this machine's rows, with a price of 0: its GPUs, if it has any of one kind, and its CPUs as one
    process."""
    gpus, memory = row(NAME), memory_gib()
    cpus = Shape(
        name=NAME if gpus is None else CPU_NAME,
        accelerator="cpu",
        processes=1,
        cpu=os.cpu_count() or 1,
        memory_gib=memory,
        # One process on a CPU uses none of it.
        shared_memory_gib=1,
        disk_gib=_free_disk_gib(),
        price_per_hour=0.0,
    )
    return (cpus,) if gpus is None else (gpus, cpus)


def is_row(shape: Shape) -> bool:
    """Return True if a shape is one of this machine's rows, and not of shapes.yaml."""
    return shape.name in (NAME, CPU_NAME) and shape not in load_shapes()


def described(shape: Shape) -> str:
    """Return what a row of this machine has, in words."""
    memory = f"{shape.memory_gib} GiB of memory"
    if shape.is_gpu:
        return f"{shape.processes} x {shape.accelerator} with {shape.gpu_memory_gib:g} GiB, {memory}"
    return f"{counted(shape.cpu, 'CPU')}, {memory}" + (
        "" if shape.name == CPU_NAME else ", no GPUs of one kind"
    )


def shape_named(name: str) -> Shape:
    """Return the row of that name, of shapes.yaml or of this machine.

    Raises:
        RecipeError: there is none (the plan was made with another shapes.yaml).
    """
    # The rows of this machine cost a call of the driver's program.
    others = rows() if name in (NAME, CPU_NAME) else ()
    for shape in (*load_shapes(), *others):
        if shape.name == name:
            return shape
    raise RecipeError(
        f"{SHAPES_FILE.name}: no row {name}; there are {', '.join(shape.name for shape in load_shapes())}"
    )


def memory_gib() -> int:
    """Return the whole GiB of this machine's memory; 2, the least of a row, if it has less."""
    return int(max(2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // GIB))


def _free_disk_gib() -> int:
    return max(1, int(shutil.disk_usage(Path.cwd()).free / GIB))


def has(here: Shape, shape: Shape) -> bool:
    """Return True if this machine, whose row is `here`, has what another row promises: as many such GPUs, and
    host memory.

    Rows of spot machines, whose prices are others, are left out.
    """
    return (
        shape.nodes == 1
        and not shape.spot
        and (shape.accelerator, shape.processes) == (here.accelerator, here.processes)
        and shape.gpu_memory_gib * (1 - MEMORY_TOLERANCE) <= here.gpu_memory_gib
        and shape.memory_gib <= here.memory_gib
        and shape.bf16 <= here.bf16
    )


def accelerator_of(product: str) -> str:
    """Return the name in accelerators.yaml of a GPU that the driver calls `product`; its own name if there is
    none."""
    words = re.split(r"[ -]+", product.upper())
    words += [first + second for first, second in pairwise(words)]
    named = [name for name in load_accelerators() if {*name.upper().split("-")} <= {*words}]
    return max(named, key=len, default=product)


def _gpus() -> list[tuple[str, float, int]]:
    """Return product, GiB and major compute capability of each GPU."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = [*_QUERY, *([f"--id={chosen}"] if chosen else [])]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        lines = [line.rsplit(", ", 2) for line in done.stdout.splitlines()]
        return [
            (product, int(mib) / 1024, int(capability.partition(".")[0]))
            for product, mib, capability in lines
        ]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _size(folder: str) -> int:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return 0
