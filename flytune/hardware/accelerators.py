"""Data sheets and measured rates of accelerators: the rows of accelerators.yaml."""

from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flytune import limits
from flytune.errors import RecipeError
from flytune.files import SETTINGS
from flytune.schema import Strict, load_rows

ACCELERATORS_FILE = SETTINGS / "accelerators.yaml"

Positive = Annotated[float, Field(gt=0, le=limits.RATE)]


class Accelerator(Strict):
    """One GPU and its links. TFLOP/s are 1e12 operations, GB/s 1e9 bytes a second."""

    name: str
    """Value of `accelerator` in shapes.yaml."""
    chip: str
    """GA100, GH100 ...: the share of matmul_tflops that is reached was measured by chip."""
    tflops: Positive
    """Peak dense 16-bit TFLOP/s from the data sheet; the base of MFU."""
    float32_tflops: Positive
    """Peak float32 TFLOP/s without tensor cores."""
    memory_gbs: Positive
    link_gbs: Positive
    """Bandwidth to the other GPUs of its node, one direction."""
    pcie_gbs: Positive
    """Bandwidth to the host, one direction."""
    network_gbs: Positive
    """Bandwidth of the complete node to others over its fabric, one direction; networks.py has limits of other networks."""
    matmul_tflops: Positive
    """Measured TFLOP/s of 16-bit matrix products."""
    attention_tflops: Positive
    """TFLOP/s of causal FlashAttention-2 over long sequences."""


def workspace_bytes(name: str) -> float:
    """Return the bytes of cuBLAS's workspaces on a GPU, which torch allocates for each thread that multiplies matrices.

    There are two: the one of the forward pass, and autograd's. 32 MiB on Hopper, on others two blocks of 4 MiB and eight of
    16 KiB (torch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize); of an unknown GPU the larger.
    """
    row = load_accelerators().get(name)
    return 2.0 * 2**10 * (32 * 1024 if row is None or row.chip.startswith("GH") else 2 * 4096 + 8 * 16)


class Accelerators(Strict):
    """The content of accelerators.yaml."""

    accelerators: Annotated[list[Accelerator], Field(min_length=1)]


@cache
def load_accelerators(path: Path = ACCELERATORS_FILE) -> dict[str, Accelerator]:
    """Return all rows, by name.

    Raises:
        RecipeError: the file is missing, or has mistakes, which are all listed; a name occurs twice.
    """
    return {row.name: row for row in load_rows(path, Accelerators, "accelerators")}


def accelerator_named(name: str) -> Accelerator:
    """Return the row of that name.

    Raises:
        RecipeError: there is none.
    """
    rows = load_accelerators()
    if name not in rows:
        raise RecipeError(
            f"{ACCELERATORS_FILE.name}: no row {name}, so the time of a step cannot be estimated; "
            f"add its data sheet's figures as a row, or name one of {', '.join(rows)}"
        )
    return rows[name]
