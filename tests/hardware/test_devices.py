"""The promises of a GPU row, compared with the GPUs that torch finds; FakeCuda is a stand-in for GPUs."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from flytune.errors import DeviceError
from flytune.failures import reports
from flytune.hardware import devices, load_shapes, shape_named
from flytune.hardware.shapes import GIB
from flytune.stages.table import Stage
from tasks.runtime.face import on_shape
from tasks.runtime.retries import AttemptFailed
from tests.support.paths import ROOT

# As torch counts it, from reports of users with that GPU.
MEMORY = {"T4": 14.56, "L4": 22.03, "A10G": 22.06, "A100-80GB": 79.15, "H100": 79.11}


class FakeCuda:
    """A stand-in for a node's driver and GPUs, as torch 2.13 shows them."""

    def __init__(self, monkeypatch, tmp_path):
        self.driver = tmp_path / "version"
        self._gpus, self._error = [], None
        monkeypatch.setattr(devices, "_DRIVER_FILE", self.driver)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "init", self._init)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self._gpus))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: self._gpus[index])
        self.has_driver("580.65.06", "Open Kernel Module for x86_64 ")

    def has_driver(self, version, module="x86_64 Kernel Module "):
        self.driver.write_text(
            f"NVRM version: NVIDIA UNIX {module} {version}  Release Build\nGCC version:  gcc version 12.2.0\n"
        )

    def has(self, count, name="NVIDIA L4", gib=22.03, capability=8):
        self._gpus = [SimpleNamespace(name=name, total_memory=int(gib * GIB), major=capability)] * count

    def fails(self, message):
        self._error = message

    def _init(self):
        if self._error:
            raise RuntimeError(self._error)


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    return FakeCuda(monkeypatch, tmp_path)


def error_of(shape):
    with pytest.raises(DeviceError) as found:
        devices.check(shape_named(shape))
    return str(found.value), reports.of_error(found.value, 0).recoverable


@pytest.mark.parametrize(
    "shape", [shape for shape in load_shapes() if shape.is_gpu], ids=lambda shape: shape.name
)
def test_the_gpus_of_each_row_are_what_it_promises(shape, cuda):
    cuda.has(shape.processes, shape.accelerator, MEMORY[shape.accelerator], 8 if shape.bf16 else 7)
    devices.check(shape)


def test_a_row_without_gpus_asks_nothing_and_may_see_some(cuda):
    cuda.has(8)
    devices.check(shape_named("cpu-1"))
    code = (
        "import sys; from flytune.hardware import devices, this_machine; "
        "devices.check(this_machine.shape_named('cpu-2')); "
    )
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("driver", "failure", "said"),
    [
        (
            None,
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a "
            "driver",
            [
                "shape l4-1: its row promises 1 x L4 with 22.0 GiB and bfloat16, but Found no NVIDIA driver",
                "kubectl describe node",
                "CUDA 13.0, driver none, NVIDIA_VISIBLE_DEVICES=void); nothing was loaded",
            ],
        ),
        (
            "535.104.05",
            "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU "
            "driver",
            [
                "driver 535.104.05, ",
                "the node's driver: CUDA 13 needs 580 or newer; or build the image with an older CUDA",
            ],
        ),
        (
            "580.65.06",
            None,
            [
                "torch finds no GPU",
                "driver 580.65.06, NVIDIA_VISIBLE_DEVICES=void",
                "the node's device plugin",
            ],
        ),
    ],
)
def test_cuda_that_does_not_start_is_told_with_what_the_node_has_and_another_may_do(
    driver, failure, said, cuda, monkeypatch
):
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "void")
    cuda.driver.unlink() if driver is None else cuda.has_driver(driver)
    cuda.fails(failure)
    found, recoverable = error_of("l4-1")
    assert [part for part in said if part not in found] == []
    assert recoverable


@pytest.mark.parametrize(
    ("shape", "gpus", "said", "recoverable"),
    [
        ("h100-8", (7, "NVIDIA H100 80GB HBM3", 79.11), "torch sees 7 of 8", True),
        ("l4-1", (2,), "torch sees 2: ", False),
        (
            "a100-80gb-1",
            (1, "NVIDIA A100-SXM4-40GB", 39.39),
            "torch sees NVIDIA A100-SXM4-40GB with 39.4 GiB",
            False,
        ),
        ("h100-8", (8, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.5), "gpu_memory_gib of the row", False),
        ("l4-1", (1, "Tesla V100-SXM2-32GB", 31.7, 7), "Tesla V100-SXM2-32GB computes in no bfloat16", False),
    ],
)
def test_other_gpus_than_promised(shape, gpus, said, recoverable, cuda):
    cuda.has(*gpus)
    assert said in error_of(shape)[0]
    assert error_of(shape)[1] == recoverable


def test_memory_may_differ_as_drivers_do_and_no_more(cuda):
    promised = shape_named("l4-1").gpu_memory_gib
    cuda.has(1, gib=promised * (1 - devices.MEMORY_TOLERANCE) + 0.01)
    devices.check(shape_named("l4-1"))
    cuda.has(1, gib=promised * (1 - devices.MEMORY_TOLERANCE) - 0.01)
    assert "gpu_memory_gib of the row" in error_of("l4-1")[0]
    cuda.has(1, gib=4 * promised)
    devices.check(shape_named("l4-1"))


def look(recipe: str) -> str:
    DONE.append(recipe)
    return recipe


DONE = []
LOOK = on_shape(Stage("look", "", "node"), look, globals(), "look_l4_1", shape_named("l4-1"))


def test_a_declared_task_looks_before_it_does_anything(cuda):
    cuda.has_driver("535.104.05")
    cuda.fails("The NVIDIA driver on your system is too old")
    with pytest.raises(AttemptFailed, match="shape l4-1: .*too old"):
        LOOK(recipe="r")
    assert DONE == []
    cuda._error = None
    cuda.has(1)
    assert LOOK(recipe="r") == "r"
    assert DONE == ["r"]
