"""Monitor of the GPUs of the first node: use, power, memory and temperature, for the log and the trackers."""

import logging
import threading
from statistics import fmean
from typing import Any

from flytune.records import GpuUse

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
        means = {name: fmean(found) for name, found in values.items()}
        return (
            GpuUse(**means, **{f"{name}_max": max(found) for name, found in values.items()})
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

    found = []
    for device in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-").removeprefix("MIG-")
        try:
            found.append(nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except nvml.NVMLError_NotFound:
            # CUDA gives the UUID of a MIG instance, without its kind.
            found.append(nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))
    return found


def _sample(nvml: Any, gpu: Any) -> dict[str, float]:
    """Return the figures of a GPU that it supports, by the names of GpuUse; a MIG instance has its memory
    only."""
    figures = {
        "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
        "temperature": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    }
    found = {}
    for name, read in figures.items():
        try:
            found[name] = float(read())
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            # NVML documents both for a figure that the device does not have.
            continue
    return found
