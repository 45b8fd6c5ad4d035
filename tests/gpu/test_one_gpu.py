"""Tests that need a GPU (`make test-gpu`): training the tiny model with real kernels."""

import os
import subprocess
import time

import pytest
import torch

from flytune import data
from flytune.data import heldout_rows
from flytune.export import gate
from flytune.hardware import Shape
from flytune.models import loading, scoring
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.training import gpu_monitor, loop
from tests.support import ranks
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

# Read from the driver's library: a process that has started CUDA cannot be forked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def this_machine() -> Shape:
    # Not from torch, which would start CUDA before training does.
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", "--id=0"]
    name, mib = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().rsplit(", ", 1)
    row = {"name": "here", "accelerator": name, "processes": 1, "gpu_memory_gib": int(mib) / 1024, "cpu": 4}
    return Shape(**row, memory_gib=32, shared_memory_gib=2, disk_gib=50, price_per_hour=1.0)


def fit(recipe, dataset, out):
    # Imported here and not in the parent: a process that has used CUDA cannot be forked.
    shape = this_machine()
    result = loop.fit(recipe, planner.make(recipe, [shape]), shape, dataset, out)
    rows = heldout_rows(dataset, scoring.GATE_SAMPLES)
    model = gate.check(recipe, out, dataset, rows, lambda: loading.exported_model(recipe, out, device_map={"": 0}))
    nll, tokens = scoring.heldout_loss(model, rows, 0, batch_size=4)
    return result, float(nll.sum() / tokens.sum())


@pytest.mark.parametrize("pair", ["full none", "lora none", "qlora device_map"])
def test_a_pair_trains_in_bfloat16_and_exports_the_trained_model(pair, tmp_path):
    method, sharding = pair.split()
    changes = {"method": method, "sharding": sharding, "model.dtype": "bfloat16", "hardware.shape": "here"}
    recipe = Recipe.model_validate(tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64), changes))
    data.prepare(DataRequest(model=recipe.model, data=recipe.data, fingerprint="x"), tmp_path / "dataset")
    result, reloaded = ranks.run(1, fit, recipe, tmp_path / "dataset", tmp_path / "trained")
    assert result.memory_kind == "GPU memory allocated"
    assert result.steps[-1].memory_bytes > 0
    assert reloaded == pytest.approx(result.heldout_loss, abs=gate.LOSS_BOUND["bfloat16"])


def sampled():
    """Return what the monitor samples while this GPU has a GiB in use."""
    held = torch.ones(2**28, device="cuda")
    with gpu_monitor.GpuMonitor(seconds=0.1) as monitor:
        monitor.begin()
        for _ in range(200):
            held.mul_(1.0)
            torch.cuda.synchronize()
            time.sleep(0.01)
        return monitor.read()


def test_the_monitor_finds_the_gpu_that_cuda_sees():
    use = ranks.run(1, sampled)
    assert use.memory_used_bytes > 2**30
    assert use.power_watts_max > 0
    assert 0 <= use.utilization <= 100


def test_every_pair_computes_on_gpus_what_plain_training_does():
    done = subprocess.run(["flytune", "selftest"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
