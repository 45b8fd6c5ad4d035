"""Peak memory of a process in each phase of its run, which the report compares with the plan."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from flytune.records.plan import LOAD
from flytune.records.training import highest


class Peaks:
    """Peak bytes by phase, of the fullest GPU of this process; without a GPU, of its host memory (RSS).

    One phase runs at a time. Where the kernel does not let a process reset the peak of its RSS, the peak of a
    phase includes the phases before it.
    """

    def __init__(self, on_enter: Sequence[Callable[[str], None]] = ()) -> None:
        """Begin with phase LOAD; each function of `on_enter` is called with the name of each later phase as
        it begins."""
        self.phase = LOAD
        self.on_enter = list(on_enter)
        self.bytes: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        """Peak bytes that the GPU's allocator had reserved, by phase; empty without a GPU."""
        self._recent: tuple[int, int | None] = 0, None
        """Peak bytes in use and reserved since the last `read`."""
        _reset()

    def enter(self, phase: str) -> None:
        """Begin `phase`, one of PHASES."""
        self._note()
        self.phase = phase
        for begun in self.on_enter:
            begun(phase)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Interrupt the running phase by another one."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def read(self) -> tuple[int, int | None]:
        """Return the peak bytes in use and reserved (None without a GPU) since the last call."""
        self._note()
        recent, self._recent = self._recent, (0, None)
        return recent

    def of_all_processes(self) -> dict[str, dict[str, int]]:
        """Return the peaks of each phase of the process that held most, as fields of Attempt. Every process
        calls it."""
        from accelerate.utils import gather_object

        self.read()
        mine = [{"peaks": self.bytes, "reserved_peaks": self.reserved}]
        found = gather_object(mine)
        return {kind: highest([one[kind] for one in found]) for kind in mine[0]}

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
        # Before CUDA is initialized there is no peak, and torch/cuda/memory.py would raise for the missing
        # device.
        for gpu in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
            torch.cuda.reset_peak_memory_stats(gpu)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): resets VmHWM
