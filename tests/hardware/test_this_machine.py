"""Tests of this machine's row, with a stand-in for nvidia-smi that prints the lines of real GPUs."""

import os

import pytest
import yaml

from flytune.doctor import laptop
from flytune.hardware import Shape, load_shapes, shape_named, this_machine


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A function that gives this machine GPUs, as lines of nvidia-smi; it prints those whose numbers --id
    names."""

    def give(*lines):
        program = tmp_path / "nvidia-smi"
        program.write_text(
            "#!/usr/bin/env python3\nimport sys\n"
            f"lines = {list(lines)!r}\n"
            "ids = [one.partition('=')[2] for one in sys.argv if one.startswith('--id=')]\n"
            "print(*(lines[int(one)] for one in ids[0].split(',')) if ids else lines, sep='\\n')\n"
        )
        program.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return give


def test_the_row_is_that_of_the_gpus_that_cuda_sees(gpus, monkeypatch):
    gpus(*["NVIDIA H200, 143771, 9.0"] * 8)
    row = this_machine.row()
    assert (row.name, row.accelerator, row.processes, row.gpu_memory_gib, row.bf16) == (
        "h200-8",
        "H200",
        8,
        140.4,
        True,
    )
    assert row.cpu == os.cpu_count()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert this_machine.row().name == "h200-2"
    gpus("Tesla T4, 15360, 7.5")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert not this_machine.row().bf16


@pytest.mark.parametrize(
    "lines", [[], ["NVIDIA H200, 143771, 9.0", "NVIDIA L4, 23034, 8.9"], ["No devices were found"]]
)
def test_a_machine_without_gpus_of_one_kind_has_no_row(lines, gpus):
    gpus(*lines)
    assert this_machine.row() is None


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "NVIDIA L40"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200 480GB"),
    ],
)
def test_drivers_names_of_accelerators(product, name):
    assert this_machine.accelerator_of(product) == name


def test_the_doctor_names_the_row_or_writes_one(gpus):
    here = shape_named("h100-8")
    assert laptop.gpus(here).said == "8 x H100 with 79.6 GiB: hardware.shape: h100-8"
    gpus("NVIDIA H200, 143771, 9.0")
    found = laptop.gpus(this_machine.row())
    assert (found.level, found.said) == (
        "WARN",
        "1 x H200 with 140.4 GiB: no row of shapes.yaml is such a machine",
    )
    (content,) = yaml.safe_load(found.do.partition(": ")[2])
    assert Shape(**content) == this_machine.row()
    smaller = here.model_copy(update={"memory_gib": 100})
    assert laptop.gpus(smaller).level == "WARN"
    assert not any(this_machine.has(smaller, shape) for shape in load_shapes())


def test_this_machine_has_rows_of_its_gpus_and_of_its_cpus(gpus):
    this_machine.rows.cache_clear()
    gpus("NVIDIA H200, 143771, 9.0")
    on_gpus, on_cpus = this_machine.rows()
    assert (on_gpus.name, on_gpus.accelerator, on_gpus.price_per_hour) == ("this-machine", "H200", 0.0)
    assert (on_cpus.name, on_cpus.accelerator, on_cpus.processes) == ("this-machine-cpu", "cpu", 1)
    assert shape_named("this-machine") == on_gpus
    assert this_machine.is_row(on_gpus)
    this_machine.rows.cache_clear()
    gpus()
    (alone,) = this_machine.rows()
    this_machine.rows.cache_clear()
    assert (alone.name, alone.accelerator, alone.cpu) == ("this-machine", "cpu", os.cpu_count())
    assert alone.memory_gib == this_machine.memory_gib()
    assert not this_machine.is_row(shape_named("cpu-1"))
