"""Measurements of a run: the time of a step by its parts, the peak memory of a process in each phase, and
use, power, memory and temperature of the first node's GPUs."""

import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from flytune import patches
from flytune.records import GpuUse
from flytune.records.plan import LOAD
from flytune.records.training import PARTS, highest


class Clock:
    """Clock that measures one part at a time, so that the parts add up to the time between two readings.

    On a GPU, where the host runs ahead, the marks between parts are CUDA events: recorded into the stream
    without waiting for it, and read when a step is logged. A part is then the time in which the GPU worked on
    it or waited for it; data that is fetched while the GPU works costs nothing.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._marks = [("other", self._mark())]

    def enter(self, part: str) -> None:
        """End the running part and begin `part`, one of PARTS."""
        self._marks.append((part, self._mark()))

    @contextmanager
    def during(self, part: str, then: str) -> Iterator[None]:
        """Measure the block as `part`; `then` begins after it."""
        self.enter(part)
        yield
        self.enter(then)

    def read(self) -> dict[str, float]:
        """Return the seconds of each part since the last reading; the running part continues."""
        self.enter(self._marks[-1][0])
        seconds = dict.fromkeys(PARTS, 0.0)
        for (part, start), (_, end) in pairwise(self._marks):
            seconds[part] += self._between(start, end)
        del self._marks[:-1]
        return seconds

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        if not self._on_gpu:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


def time_engine(engine: Any, clock: Clock) -> None:
    """Make a DeepSpeed engine, which clips and updates within the last backward pass, report its `step` as
    the update."""
    step = engine.step

    @functools.wraps(step)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with clock.during("update", then="update"):
            return step(*args, **kwargs)

    patches.deepspeed.ENGINE_STEP.on(engine, timed)


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
        peaks_of_all = gather_object(mine)
        return {kind: highest([peaks[kind] for peaks in peaks_of_all]) for kind in mine[0]}

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
    match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(match[1]) * 1024 if match else 0, None


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


log = logging.getLogger(__name__)

SECONDS = 5.0
"""Seconds between two samples."""


class GpuMonitor:
    """Thread that samples the GPUs that this process sees; NVML answers from the driver, so that no GPU waits
    for it.

    Nothing of it reaches training: without NVML, and where it fails, the log has one line and the steps have
    no figures.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        """Prepare a monitor; `begin` starts it."""
        self._seconds = seconds
        self._values: dict[str, list[float]] = {}
        """Values of all GPUs by figure, since the last `read`."""
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "GpuMonitor":
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread:
            # Not for longer: NVML may hang on a GPU that is lost, and the thread is a daemon.
            self._thread.join(timeout=1.0)

    def begin(self) -> None:
        """Begin to sample; CUDA is initialized by now."""
        self._thread = threading.Thread(target=self._monitor, name="gpu-monitor", daemon=True)
        self._thread.start()

    def read(self) -> GpuUse | None:
        """Return mean and maximum since the last call, over all samples and GPUs; None if there is no
        sample."""
        with self._lock:
            values, self._values = self._values, {}
        means = {name: fmean(value) for name, value in values.items()}
        return (
            GpuUse(**means, **{f"{name}_max": max(value) for name, value in values.items()})
            if values
            else None
        )

    def _monitor(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            try:
                gpus = _visible(pynvml)
                while not self._over.wait(self._seconds):
                    for gpu in gpus:
                        self._add(_sample(pynvml, gpu))
            finally:
                pynvml.nvmlShutdown()
        except Exception as error:  # noqa: BLE001 (whatever driver and library raise, training goes on)
            log.warning("use of the GPUs is not recorded from here on: %s", error or type(error).__name__)

    def _add(self, sample: dict[str, float]) -> None:
        with self._lock:
            for name, value in sample.items():
                self._values.setdefault(name, []).append(value)


def _visible(nvml: Any) -> list[Any]:
    """Return NVML's handles of CUDA's devices. By UUID: NVML knows no CUDA_VISIBLE_DEVICES, and may count in
    another order."""
    import torch

    handles = []
    for device in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-").removeprefix("MIG-")
        try:
            handles.append(nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except nvml.NVMLError_NotFound:
            # CUDA gives the UUID of a MIG instance, without its kind.
            handles.append(nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))
    return handles


def _sample(nvml: Any, gpu: Any) -> dict[str, float]:
    """Return the figures of a GPU that it supports, by the names of GpuUse; a MIG instance has its memory
    only."""
    figures = {
        "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
        "temperature": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    }
    values = {}
    for name, read in figures.items():
        try:
            values[name] = float(read())
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            # NVML documents both for a figure that the device does not have.
            continue
    return values
