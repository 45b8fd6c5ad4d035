"""Requirements of a run by resource and phase, and the verdict that follows."""

import sys
from importlib import metadata

import pytest

from flytune.errors import DoesNotFit
from flytune.hardware import shape_named
from flytune.hardware.shapes import GIB
from flytune.objectives.bound import BoundRecipe
from flytune.planning import planner, requirements
from flytune.records import Need
from flytune.records.plan import DRAW, EVALUATE, EXPORT, LOAD, PHASES, SAVE, STEP, verdict
from tests.support.paths import ROOT
from tests.support.plans import GEOMETRY, recipe_of, shape_of, workload_of
from training_estimates import model_states

EIGHT = 8_030_261_248


def needs_of(recipe, shape="h100-8", micro_batch=1):
    shape = shape_named(shape) if isinstance(shape, str) else shape
    work = workload_of(recipe, shape=shape, micro_batch=micro_batch)
    found = requirements.of(BoundRecipe(recipe), shape, work, model_states.of(work))
    return {need.resource: need for need in found}


def test_a_gpu_shape_has_four_resources_and_all_phases():
    found = needs_of(recipe_of(sharding="fsdp"))
    assert list(found) == ["GPU memory", "host memory", "/dev/shm", "disk"]
    assert [*found["GPU memory"].phases] == [phase for phase in PHASES if phase != DRAW]
    assert list(needs_of(recipe_of(sharding="ddp"), "cpu-2")) == ["process memory", "/dev/shm", "disk"]


def test_the_optimizer_is_there_after_the_first_update_and_activations_while_training():
    phases = needs_of(recipe_of(sharding="none"), "a100-80gb-1")["GPU memory"].phases
    assert "optimizer" not in phases[LOAD]
    assert phases[SAVE]["optimizer"] == phases[STEP]["optimizer"] == 8 * EIGHT
    assert "activations" not in phases[SAVE]
    assert sum(phases[LOAD].values()) < sum(phases[EVALUATE].values()) < sum(phases[STEP].values())


def test_a_4_bit_base_is_whole_on_each_gpu_before_it_is_sharded():
    recipe = recipe_of(method="qlora", sharding="fsdp")
    phases = needs_of(recipe)["GPU memory"].phases
    # Scales stay whole: bitsandbytes keeps them beside the parameters that FSDP shards.
    scales = model_states.scale_bytes(workload_of(recipe).geometry, "nf4_double")
    assert phases[LOAD]["loading"] == pytest.approx(7 * (phases[LOAD]["weights"] - scales), rel=1e-6)
    assert "loading" not in phases[STEP]


@pytest.mark.parametrize(
    ("changes", "bytes_each"),
    [
        ({"sharding": "ddp"}, 4 * EIGHT),  # float32 copies of a 16-bit file wait on the host, in each process
        ({"sharding": "zero2"}, 0),  # the file's own dtype is mapped
        ({"sharding": "fsdp"}, 0),  # each process reads its slices
        ({"sharding": "ddp", "method": "lora"}, 0),
    ],
)
def test_host_memory_while_loading(changes, bytes_each):
    table = needs_of(recipe_of(**changes))["host memory"].phases[LOAD]
    assert table.get("weights as loaded", 0) == pytest.approx(8 * requirements.CONVERTED * bytes_each)
    assert table["processes"] == round(8 * requirements.CUDA_BUILD_GIB * GIB)
    assert table["CUDA"] == round(8 * requirements.CUDA_HOST_GIB * GIB)
    assert "NCCL" not in table, "GPUs of a node talk through /dev/shm"


def test_each_process_has_host_memory_for_cuda_and_for_other_nodes():
    # pytorch/pytorch issue 113326: maximum resident set sizes with and without a tensor on the GPU.
    assert pytest.approx(1.65, abs=0.01) == requirements.CUDA_HOST_GIB
    two = needs_of(recipe_of(sharding="fsdp"), shape=shape_of(nodes=2, processes=8))["host memory"].phases
    assert two[STEP]["NCCL"] == round(8 * 2 * 16 * 9.19 * 2**20)
    alone = needs_of(recipe_of(method="qlora", sharding="device_map"))["host memory"].phases
    assert alone[STEP]["CUDA"] == round(requirements.CUDA_HOST_GIB * GIB), "one process over all GPUs"
    on_cpu = needs_of(recipe_of(), shape=shape_named("cpu-1"))["process memory"].phases
    assert not {"CUDA", "NCCL"} & set(on_cpu[STEP])


def test_loading_and_converting_takes_what_was_published():
    """Llama 2 7B as float32 on rank 0: 32,744 MiB of host memory, 1,506 of them without the model."""
    weights = 6_738_415_616 * 4 / 2**20
    assert 1506 + requirements.CONVERTED * weights == pytest.approx(32_744, rel=0.01)


@pytest.mark.parametrize(
    ("installed", "on_cpu"),
    [
        ("2.13.0+cpu", 1.0),
        ("2.13.0", 1.27),
        ("2.13.0+cu130", 1.27),
        (None, 1.27),
    ],  # none: the plan task's image
)
def test_a_process_takes_what_the_build_of_torch_does(installed, on_cpu, monkeypatch):
    def version(name):
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(sys, "platform", "linux")
    requirements._has_cpu_build.cache_clear()
    try:
        recipe = recipe_of(sharding="ddp")
        assert needs_of(recipe, "cpu-2")["process memory"].phases[STEP]["process"] == round(on_cpu * GIB)
        assert needs_of(recipe)["host memory"].phases[STEP]["processes"] == round(8 * 1.27 * GIB), (
            "GPUs run the train image"
        )
    finally:
        requirements._has_cpu_build.cache_clear()


def test_the_train_image_has_the_build_that_a_lock_without_one_names():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert [line for line in lines if line.startswith("torch==")] == ["torch==2.13.0"]


def test_what_is_offloaded_leaves_the_gpu_for_the_host_and_the_disk():
    whole = 16 * EIGHT  # float32 weights, gradients and two moments
    on_gpu = needs_of(recipe_of(sharding="fsdp"))
    assert on_gpu["host memory"].phases[SAVE]["checkpoint"] == 12 * EIGHT, (
        "copies that are written while training goes on"
    )
    assert "checkpoint" not in needs_of(recipe_of(sharding="fsdp", method="lora"))["host memory"].phases[SAVE]
    on_host = needs_of(recipe_of(sharding={"name": "fsdp", "offload": "cpu"}))
    assert on_host["host memory"].phases[STEP]["offloaded"] == pytest.approx(whole, rel=1e-6)
    assert on_gpu["GPU memory"].peak_bytes - on_host["GPU memory"].peak_bytes > 0.8 * whole / 8
    on_disk = needs_of(recipe_of(sharding={"name": "zero3", "offload": "nvme"}))
    assert (
        on_disk["disk"].phases[STEP]["offloaded"] == 16 * EIGHT
    )  # 16-bit weights and gradients, float32 master weights and moments
    assert "offloaded" not in on_disk["host memory"].components
    assert not {"weights", "optimizer"} & set(on_disk["GPU memory"].components)


def test_checkpoints_and_the_export_count_on_the_disk():
    kept = needs_of(recipe_of(sharding="fsdp", checkpoints={"save_steps": 10, "folder": "here"}))["disk"]
    assert kept.peak_phase == EXPORT
    assert kept.phases[SAVE]["checkpoints"] == 3 * 12 * EIGHT
    assert kept.phases[EXPORT]["export"] == 2 * EIGHT
    mounted = {"save_steps": 10, "folder": "/mnt/checkpoints"}
    assert "checkpoints" not in needs_of(recipe_of(sharding="fsdp", checkpoints=mounted))["disk"].components


def test_a_need_names_its_peak():
    need = Need(resource="disk", available_bytes=100, phases={"load": {"a": 10}, "save": {"a": 10, "b": 85}})
    assert (need.peak_phase, need.peak_bytes, need.largest, need.margin_bytes) == ("save", 95, ("b", 85), 5)
    assert need.components == ["b", "a"]
    assert [verdict(share) for share in (0.9, 0.95, 1.01)] == ["fits", "tight", "does not fit"]


def test_host_memory_that_is_short_is_named():
    recipe = recipe_of(sharding={"name": "fsdp", "offload": "cpu"}, hardware={"shape": "s"})
    small = shape_of(nodes=2, processes=4, memory_gib=64, disk_gib=4000)
    with pytest.raises(
        DoesNotFit,
        match=r"s: \d+\.\d GiB of host memory missing: needs \d+\.\d \(.*most of it offloaded[^\n]*\n.*\n"
        r" +offloaded: 16.0 bytes x 8.03 billion trained parameters \(weights, gradients, states\), on 2 "
        r"nodes",
    ):
        planner.make(recipe, [small], GEOMETRY)


SAVED = {"save_steps": 10, "folder": "s3://bucket/runs"}
EVERY = {"address": "hf://a/b", "every_save": True}


@pytest.mark.parametrize(
    ("changes", "width"),
    [({"sharding": "fsdp"}, 2), ({"sharding": "fsdp", "method": "lora"}, 4), ({"sharding": "ddp"}, 2)],
)
def test_weights_are_written_beside_checkpoints_to_be_published(changes, width):
    before, after = (
        recipe_of(**changes, checkpoints=SAVED),
        recipe_of(**changes, checkpoints=SAVED, publish=EVERY),
    )
    published = width * workload_of(after).trained
    disks = [sum(needs_of(recipe)["disk"].phases[SAVE].values()) for recipe in (before, after)]
    assert disks[1] - disks[0] == published
    assert needs_of(after)["host memory"].phases[SAVE].get("file being written", 0) == min(
        requirements.EXPORT_FILE, published
    )
    assert len(requirements.gather_reason(BoundRecipe(after), workload_of(after))) == 1
    assert requirements.gather_reason(BoundRecipe(before), workload_of(before)) == []


def test_the_plan_says_what_gathering_costs():
    recipe = recipe_of(sharding="fsdp", checkpoints=SAVED, publish=EVERY)
    assert requirements.gather_reason(BoundRecipe(recipe), workload_of(recipe)) == [
        "publish.every_save: each save also writes the weights as the export does, 15 GiB on the first node: "
        "training waits 16.1 s at 1 GB/s (assumed), with 4.66 GiB of host memory for a file"
    ]


def test_zero3_gathers_all_trained_weights_for_a_checkpoint():
    saving = needs_of(recipe_of(sharding="zero3", checkpoints=SAVED))["host memory"].phases
    assert saving[SAVE]["gathered weights"] == 2 * EIGHT
    assert "gathered weights" not in saving[STEP]
    assert "gathered weights" not in needs_of(recipe_of(sharding="zero3"))["host memory"].phases[SAVE]
    assert (
        "gathered weights"
        not in needs_of(recipe_of(sharding="zero2", checkpoints=SAVED))["host memory"].phases[SAVE]
    )
