"""What an accelerator can do: one row of accelerators.yaml."""

from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flytune.errors import RecipeError
from flytune.schema import Strict, load_rows

ACCELERATORS_FILE = Path(__file__).resolve().parents[2] / "accelerators.yaml"

Positive = Annotated[float, Field(gt=0)]


class Accelerator(Strict):
    """One GPU, and how it reaches others. TFLOP/s are 1e12 operations, GB/s 1e9 bytes a second."""

    name: str
    """As `accelerator` in shapes.yaml."""
    chip: str
    """GA100, GH100 ...: which share of matmul_tflops is reached was measured by chip."""
    tflops: Positive
    """Of the data sheet: dense, 16 bits. Shares of use (MFU) are of this."""
    float32_tflops: Positive
    """Outside the tensor cores."""
    memory_gbs: Positive
    link_gbs: Positive
    """To the other GPUs of its node, one direction."""
    pcie_gbs: Positive
    """To the host, one direction."""
    network_gbs: Positive
    """Of the whole node to others, one direction."""
    matmul_tflops: Positive
    """That 16-bit matrix products were measured to reach."""
    attention_tflops: Positive
    """Of causal FlashAttention-2 over long sequences."""


class Accelerators(Strict):
    """The content of accelerators.yaml."""

    accelerators: Annotated[list[Accelerator], Field(min_length=1)]


@cache
def load_accelerators(path: Path = ACCELERATORS_FILE) -> dict[str, Accelerator]:
    """All rows, by name.

    Raises:
        RecipeError: the file is missing or lists all its mistakes; a name stands twice.
    """
    return {row.name: row for row in load_rows(path, Accelerators, "accelerators")}


def accelerator_named(name: str) -> Accelerator:
    """The row of that name.

    Raises:
        RecipeError: there is none.
    """
    rows = load_accelerators()
    if name not in rows:
        raise RecipeError(
            f"{ACCELERATORS_FILE.name}: no row {name}, so the time of a step cannot be told; "
            f"add its data sheet's figures as a row, or name one of {', '.join(rows)}"
        )
    return rows[name]
