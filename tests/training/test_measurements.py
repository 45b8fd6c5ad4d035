"""Monitor of the GPUs, with a mock of NVML: pynvml's own module, functions and errors over devices of a
dictionary."""

import logging
import sys
import threading
from types import SimpleNamespace

import pynvml
import pytest

from flytune.recipe import Recipe
from flytune.records import GpuUse, Step
from flytune.sharding import sharding_of
from flytune.training import measurements
from flytune.training.measurements import GpuMonitor
from tests.support.recipes import content
from tests.support.waiting import LIMIT, until

LINE = (
    '{"step":1,"epoch":0.5,"loss":2.0,"eval_loss":null,"learning_rate":0.1,"grad_norm":1.0,"seconds":1.0,"data_seconds":0.1,'
    '"forward_seconds":0.2,"backward_seconds":0.3,"update_seconds":0.1,"eval_seconds":0.0,"tokens":9,"tokens_per_second":9.0,'
    '"memory_bytes":7,"memory_reserved_bytes":null}'
)
"""A line of steps.jsonl of version 0.1.0."""
BUSY = {"utilization": 90, "power": 300_000, "memory": 70 << 30, "temperature": 60}
IDLE = {"utilization": 10, "power": 100_000, "memory": 10 << 30, "temperature": 40}


class MockNvml:
    """Mock of a machine's NVML: devices by UUID; a figure that a device does not have is not supported."""

    def __init__(self, monkeypatch, devices, visible):
        self.devices, self.open, self.samples = devices, 0, threading.Event()
        for name in dir(self):
            if name.startswith("nvml"):
                monkeypatch.setattr(pynvml, name, getattr(self, name))
        import torch

        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=visible[device])
        )

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.devices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def _figure(self, gpu, name):
        value = self.devices[gpu].get(name, pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))
        if isinstance(value, pynvml.NVMLError):
            raise value
        return value

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=self._figure(gpu, "utilization"), memory=0)

    def nvmlDeviceGetPowerUsage(self, gpu):
        return self._figure(gpu, "power")

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(used=self._figure(gpu, "memory"))

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        self.samples.set()
        return self._figure(gpu, "temperature")


def test_figures_are_of_the_gpus_that_cuda_sees(monkeypatch):
    nvml = MockNvml(monkeypatch, {"GPU-a": IDLE, "GPU-b": BUSY, "GPU-c": IDLE}, visible=["b"])
    assert measurements._visible(pynvml) == ["GPU-b"]
    with GpuMonitor(seconds=0.001) as monitor:
        assert monitor.read() is None
        monitor.begin()
        nvml.samples.wait(LIMIT)
        until(lambda: "temperature" in monitor._values)
        thread = monitor._thread
    assert not thread.is_alive()
    assert nvml.open == 0
    use = monitor.read()
    assert (use.utilization, use.utilization_max, use.power_watts, use.temperature_max) == (90, 90, 300, 60)
    assert use.memory_used_bytes_max == 70 << 30
    assert monitor.read() is None, "each sample counts once"


def test_mean_and_maximum_are_over_samples_and_gpus():
    monitor = GpuMonitor()
    for values in ((90, 300), (10, 100), (50, 200)):
        monitor._add(dict(zip(("utilization", "power_watts"), values, strict=True)))
    assert monitor.read() == GpuUse(utilization=50, utilization_max=90, power_watts=200, power_watts_max=300)


def test_a_mig_instance_has_the_figures_that_it_supports(monkeypatch):
    MockNvml(monkeypatch, {"MIG-x": {"memory": 5}}, visible=["x"])
    (gpu,) = measurements._visible(pynvml)
    assert measurements._sample(pynvml, gpu) == {"memory_used_bytes": 5}


@pytest.mark.parametrize("prefix", ["", "GPU-"])
def test_a_uuid_is_found_with_and_without_its_kind(prefix, monkeypatch):
    MockNvml(monkeypatch, {"GPU-a": BUSY}, visible=[f"{prefix}a"])
    assert measurements._visible(pynvml) == ["GPU-a"]


def begun(monitor):
    """Begin and wait until the thread has ended."""
    monitor.begin()
    monitor._thread.join(LIMIT)
    assert not monitor._thread.is_alive()
    return monitor.read()


def test_a_machine_without_the_driver_has_one_log_line(monkeypatch, caplog):
    def without_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", without_driver)
    with caplog.at_level(logging.WARNING), GpuMonitor() as monitor:
        assert begun(monitor) is None
    assert [record.message for record in caplog.records] == [
        "use of the GPUs is not recorded from here on: NVML Shared Library Not Found"
    ]


def test_an_environment_without_nvidia_ml_py_has_one_log_line(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level(logging.WARNING), GpuMonitor() as monitor:
        assert begun(monitor) is None
    assert len(caplog.records) == 1
    assert "pynvml" in caplog.text


def test_a_gpu_that_is_lost_ends_the_monitor_and_not_the_run(monkeypatch, caplog):
    lost = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    nvml = MockNvml(monkeypatch, {"GPU-a": BUSY, "GPU-b": BUSY | {"utilization": lost}}, visible=["a", "b"])
    with caplog.at_level(logging.WARNING), GpuMonitor(seconds=0.001) as monitor:
        assert begun(monitor).utilization == 90, "what was sampled before"
    assert [record.message for record in caplog.records] == [
        "use of the GPUs is not recorded from here on: GPU is lost"
    ]
    assert nvml.open == 0


def test_a_driver_that_hangs_holds_up_no_run(monkeypatch):
    nvml = MockNvml(monkeypatch, {"GPU-a": BUSY}, visible=["a"])
    entered, released = threading.Event(), threading.Event()
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: (entered.set(), released.wait(LIMIT), nvml.nvmlInit()))
    with GpuMonitor() as monitor:
        monitor.begin()
        assert entered.wait(LIMIT)
        assert monitor.read() is None
    assert monitor._thread.is_alive(), "the run goes on while NVML does not answer"
    released.set()
    monitor._thread.join(LIMIT)


def test_lines_without_figures_are_those_of_version_0_1():
    assert Step.model_validate_json(LINE).model_dump_json() == LINE


def test_lines_with_figures_are_read_again():
    step = Step.model_validate_json(LINE).model_copy(
        update={"gpu": GpuUse(utilization=1.0, utilization_max=2.0)}
    )
    assert Step.model_validate_json(step.model_dump_json()) == step


def test_deepspeed_reads_no_list_of_uuids(monkeypatch):
    """With nvidia-ml-py it would read CUDA_VISIBLE_DEVICES as numbers when ZeRO 1 and 2 start."""
    from deepspeed.accelerator import cuda_accelerator

    monkeypatch.setattr(cuda_accelerator, "pynvml", pynvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    accelerator = object.__new__(cuda_accelerator.CUDA_Accelerator)
    with pytest.raises(ValueError, match="invalid literal for int"):
        accelerator.available_memory(0)
    sharding_of(Recipe.model_validate(content(sharding="zero2"))).before_load("cuda")
    monkeypatch.setattr(accelerator, "total_memory", lambda index: 7)
    monkeypatch.setattr(accelerator, "memory_allocated", lambda index: 2)
    assert accelerator.available_memory(0) == 5
