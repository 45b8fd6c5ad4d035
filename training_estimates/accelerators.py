"""Data sheets of GPUs, with rates that were measured."""

from typing import Annotated

from pydantic import Field

from training_estimates.sizes import Immutable

Positive = Annotated[float, Field(gt=0, le=1e9)]


class Accelerator(Immutable):
    """One GPU and its links. TFLOP/s are 1e12 operations, GB/s 1e9 bytes a second."""

    name: str
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
    """Bandwidth of the complete node to others over its fabric, one direction; Workload.network_gbs limits
    it."""
    matmul_tflops: Positive
    """Measured TFLOP/s of 16-bit matrix products."""
    attention_tflops: Positive
    """TFLOP/s of causal FlashAttention-2 over long sequences."""


def workspace_bytes(chip: str | None) -> float:
    """Return the bytes of cuBLAS's workspaces on a GPU, which torch allocates for each thread that multiplies
    matrices.

    There are two: the one of the forward pass, and autograd's. 32 MiB on Hopper, on others two blocks of 4
    MiB and eight of 16 KiB (torch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize);
    of an unknown GPU the larger.
    """
    is_large = chip is None or chip.startswith("GH")
    return 2.0 * 2**10 * (32 * 1024 if is_large else 2 * 4096 + 8 * 16)
