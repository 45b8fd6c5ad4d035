"""How much memory a process has held at most, phase by phase of its run: what the plan is held against."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flytune.records.plan import LOAD


class Peaks:
    """Peak bytes by phase, of the fullest GPU of this process; without a GPU, of its host memory (RSS).

    One phase runs at a time. Where the kernel does not let a process reset the peak of its RSS, a phase also tells what
    was held before it.
    """

    def __init__(self) -> None:
        self.phase = LOAD
        self.on_enter: Callable[[str], None] = lambda phase: None
        """Function that is called as a phase begins."""
        self.bytes: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        """What the GPU's allocator had taken; empty without a GPU."""
        self._recent: tuple[int, int | None] = 0, None
        """Peak bytes in use and reserved since the last `read`."""
        _reset()

    def enter(self, phase: str) -> None:
        """From now on `phase` runs, one of PHASES."""
        self._note()
        self.phase = phase
        self.on_enter(phase)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase in the midst of another one."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def read(self) -> tuple[int, int | None]:
        """Return the peak bytes since the last call, and those of what was reserved (None without a GPU)."""
        self._note()
        recent, self._recent = self._recent, (0, None)
        return recent

    def _note(self) -> None:
        held, reserved = _peak()
        self.bytes[self.phase] = max(held, self.bytes.get(self.phase, 0))
        if reserved is not None:
            self.reserved[self.phase] = max(reserved, self.reserved.get(self.phase, 0))
            reserved = max(reserved, self._recent[1] or 0)
        self._recent = max(held, self._recent[0]), reserved
        _reset()


def _peak() -> tuple[int, int | None]:
    import torch

    if torch.cuda.is_available():
        gpus = range(torch.cuda.device_count())
        return max(map(torch.cuda.max_memory_allocated, gpus)), max(map(torch.cuda.max_memory_reserved, gpus))
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else 0, None


def _reset() -> None:
    import torch

    if torch.cuda.is_available():
        # What CUDA has not begun has no peak; torch/cuda/memory.py passes the question on to a device that is not there yet.
        for gpu in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
            torch.cuda.reset_peak_memory_stats(gpu)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): resets VmHWM
