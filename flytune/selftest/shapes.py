"""Shapes for the machine of the self-test: all its GPUs (or two ranks on a CPU), one process alone, and on a
CPU four ranks too."""

import os
import shutil
import tempfile
from pathlib import Path

from flytune.hardware import Shape, this_machine
from flytune.hardware.shapes import GIB
from flytune.recipe import Recipe
from flytune.selftest import processes as selftest_processes
from flytune.sharding import sharding_of

CPU_RANKS = 2
GROUPED_RANKS = 4
"""Fewest processes of two groups that shard."""


def shapes(nodes: int = 1) -> list[Shape]:
    """Return shapes for `nodes` nodes like this: with all GPUs, or without GPUs with at least two gloo ranks
    in all.

    The first one is where a pair runs that can; then follow one with a single process, and without GPUs one
    with four ranks.
    """
    # In a separate process: one that has used CUDA cannot be forked, and every training run is a fork of this
    # process.
    gpus, has_async_io = selftest_processes.run(1, _devices)
    name, gpu_memory = gpus[0] if gpus else ("cpu", 0.0)
    processes = len(gpus) or max(1, CPU_RANKS // nodes)
    here = Shape(
        name=_name(processes, nodes),
        accelerator=name,
        nodes=nodes,
        processes=processes,
        gpu_memory_gib=gpu_memory,
        cpu=os.cpu_count() or 1,
        memory_gib=this_machine.memory_gib(),
        shared_memory_gib=1,
        disk_gib=max(1, shutil.disk_usage(tempfile.gettempdir()).free // GIB),
        nvme=has_async_io and any(Path("/sys/block").glob("nvme*")),
        price_per_hour=0.0,
    )
    alone = here.model_copy(update={"name": _name(1, 1), "nodes": 1, "processes": 1})
    able = [here, alone] if here.world_size > 1 else [alone]
    if gpus or here.world_size >= GROUPED_RANKS:
        return able
    ranks = -(-GROUPED_RANKS // nodes)
    return [*able, here.model_copy(update={"name": _name(ranks, nodes), "processes": ranks})]


def _name(processes: int, nodes: int) -> str:
    """Return the name of a shape."""
    return f"selftest-{processes}" + f"x{nodes}" * (nodes > 1)


def _devices() -> tuple[list[tuple[str, float]], bool]:
    """Return name and memory in GiB of each visible GPU, and whether DeepSpeed can offload to disks
    (libaio)."""
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(gpu.name, gpu.total_memory / GIB) for gpu in gpus], bool(
        AsyncIOBuilder().is_compatible(verbose=False)
    )


def shape_for(recipe: Recipe, here: list[Shape]) -> Shape | None:
    """Return the first of this machine's shapes that the recipe's sharding can run on."""
    return next((shape for shape in here if sharding_of(recipe).misfit(shape) is None), None)


def lacks(recipe: Recipe, here: list[Shape]) -> str | None:
    """Return the hardware that this machine lacks for the recipe's sharding; None if no machine can run
    it."""
    gpu = here[0].model_copy(update={"accelerator": "GPU", "gpu_memory_gib": 80.0})
    machines = {
        "needs NVMe": here[0].model_copy(update={"nvme": True}),
        "needs a GPU": gpu.model_copy(update={"processes": 1}),
        "needs GPUs": gpu.model_copy(update={"processes": 2}),
        f"needs {GROUPED_RANKS} GPUs": gpu.model_copy(update={"processes": GROUPED_RANKS}),
        "needs a GPU and NVMe": gpu.model_copy(update={"processes": 1, "nvme": True}),
        "needs GPUs and NVMe": gpu.model_copy(update={"processes": 2, "nvme": True}),
    }
    return next(
        (words for words, shape in machines.items() if sharding_of(recipe).misfit(shape) is None), None
    )
