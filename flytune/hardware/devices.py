"""GPUs of this machine, compared with what the row of shapes.yaml promises, before anything is loaded."""

import os
import re
from pathlib import Path
from typing import Any

from flytune.errors import DeviceError
from flytune.hardware.shapes import GIB, Shape

MEMORY_TOLERANCE = 0.05
"""Share of a row's gpu_memory_gib that a GPU may lack: drivers keep some, 0.1 to 1.5 % by version. A row that
names the marketing figure (24 for an L4, which has 22.0) is 7 % off and more."""
OLDEST_DRIVER = {12: 525, 13: 580}
"""Oldest driver by CUDA's major version (NVIDIA's table of minor version compatibility)."""
AMPERE = 8
"""Major compute capability from which on NVIDIA's GPUs compute in bfloat16."""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def configure_allocator() -> None:
    """Configure torch's allocator of GPU memory, which reads this when CUDA starts: segments that grow leave
    fewer holes."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def check(shape: Shape) -> None:
    """Compare this node's GPUs with its row: their number, their memory, bfloat16. A row without GPUs may see
    some.

    Raises:
        DeviceError: they differ. Recoverable where another node may have them: an attempt that loads nothing
            costs a minute.
    """
    if not shape.is_gpu:
        return
    import torch

    configure_allocator()
    if torch.version.cuda is None:
        raise _error(
            shape,
            f"torch {torch.__version__} is built without CUDA",
            "an image with PyPI's torch for Linux, as the Dockerfile builds it; on a machine without GPUs, a "
            "cpu row",
        )
    try:
        torch.cuda.init()
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        raise _unusable(shape, " ".join(str(error).split())[:300]) from None
    if not gpus:
        raise _unusable(shape, "torch finds no GPU")
    _compare(shape, gpus)


def _compare(shape: Shape, gpus: list[Any]) -> None:
    seen = ", ".join(f"{gpu.name} with {gpu.total_memory / GIB:.1f} GiB" for gpu in gpus)
    if len(gpus) < shape.processes:
        advice = (
            "nvidia.com/gpu of the pod and of its node; a GPU that is broken leaves its device plugin's list"
        )
        raise _error(shape, f"torch sees {len(gpus)} of {shape.processes}: {seen}", advice, goes_on=True)
    if len(gpus) > shape.processes:
        advice = (
            "a row with as many processes, or CUDA_VISIBLE_DEVICES; one process would spread each "
            "batch over all of them"
        )
        raise _error(shape, f"torch sees {len(gpus)}: {seen}", advice)
    least = shape.gpu_memory_gib * (1 - MEMORY_TOLERANCE) * GIB
    if any(gpu.total_memory < least for gpu in gpus):
        advice = (
            "gpu_memory_gib of the row, as torch counts it, or the nodes' labels: another kind of GPU, "
            "or a part of one"
        )
        raise _error(shape, f"torch sees {seen}", advice)
    if shape.bf16 and (old := [gpu.name for gpu in gpus if gpu.major < AMPERE]):
        advice = (
            "bf16: false in the row and model.dtype: float16 in the recipe, or nodes with Ampere and newer"
        )
        raise _error(shape, f"{', '.join(sorted(set(old)))} computes in no bfloat16", advice)


def _unusable(shape: Shape, reason: str) -> DeviceError:
    """Return the error for CUDA that does not start, which is the node's: another one may do."""
    import torch

    major, driver = int(str(torch.version.cuda).partition(".")[0]), driver_version()
    oldest = OLDEST_DRIVER.get(major)
    if driver is None:
        advice = (
            "whether the node has GPUs and its driver: `kubectl describe node`, the GPU operator or "
            "device plugin"
        )
    elif oldest and int(driver.partition(".")[0]) < oldest:
        advice = (
            f"the node's driver: CUDA {major} needs {oldest} or newer; or build the image with an "
            "older CUDA and its torch"
        )
    else:
        advice = "nvidia.com/gpu of the pod, the node's device plugin and its container runtime"
    return _error(shape, reason, advice, goes_on=True)


def _error(shape: Shape, reason: str, advice: str, goes_on: bool = False) -> DeviceError:
    import torch

    precision = " and bfloat16" if shape.bf16 else ""
    promised = f"{shape.processes} x {shape.accelerator} with {shape.gpu_memory_gib} GiB{precision}"
    chosen = "".join(
        f", {name}={os.environ[name]}"
        for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
        if name in os.environ
    )
    return DeviceError(
        f"shape {shape.name}: its row promises {promised}, but {reason} (torch {torch.__version__}, CUDA "
        f"{torch.version.cuda or 'none'}, driver {driver_version() or 'none'}{chosen}); nothing was loaded. "
        f"Look at {advice}",
        goes_on=goes_on,
    )


def driver_version() -> str | None:
    """Return the version of the node's NVIDIA driver, which containers see as well; None where it has
    none."""
    try:
        text = _DRIVER_FILE.read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else None
