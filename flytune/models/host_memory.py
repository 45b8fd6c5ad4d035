"""Host memory of a process that computes on a CPU: large freed blocks, and the logits of the loss."""

import ctypes
import os

from flytune import patches

CPU_LOSS_TOKENS = 128
"""Tokens whose logits TRL's chunked loss has at a time on a CPU. Its default of 4,096
(trl/kernels/chunked_logprob.py) is meant for a GPU kernel: in torch's operations it takes 4.3 GiB for a
vocabulary of 32,768 tokens and more."""
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
"""Parameters of mallopt (glibc's malloc.h)."""
MAPPED = 2**20
"""Bytes from which a block gets a mapping of its own, which is returned to the system when it is freed."""
TRIMMED = 2**26
"""Bytes at the top of the heap that may stay free: with glibc's 128 KiB the heap would constantly grow and
shrink."""


def return_freed_blocks() -> None:
    """Have glibc return large freed blocks to the system at once; does nothing with another libc, or where
    MALLOC_* is set.

    By default the threshold rises with the blocks that are freed, to 32 MiB, and activations come to be in
    the heap. torch aligns tensors to 64 bytes, for which glibc asks the heap for more than the tensor's size:
    the hole that a tensor leaves is too small for the next of the same size. docs/measured/cpus.md has the
    figures.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt(_M_MMAP_THRESHOLD, MAPPED)
    mallopt(_M_TRIM_THRESHOLD, TRIMMED)


def use_small_loss_tiles() -> None:
    """Have TRL's chunked loss compute the logits of CPU_LOSS_TOKENS tokens at a time."""
    patches.trl.LOSS_TILE.install(CPU_LOSS_TOKENS)
