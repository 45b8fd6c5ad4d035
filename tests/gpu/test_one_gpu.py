"""Tests that need a GPU (`make test-gpu`): training the tiny model with real kernels."""

import os
import subprocess
import time

import pytest
import torch

from flytune import data
from flytune.data import heldout_rows
from flytune.export import gate
from flytune.hardware import this_machine
from flytune.models import loading, scoring
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.training import loop, measurements, step_log
from tests.support import ranks
from tests.support.process_kills import kill_once_saved
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

# Read from the driver's library: a process that has started CUDA cannot be forked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def fit(recipe, dataset, out):
    # Imported here and not in the parent: a process that has used CUDA cannot be forked.
    shape = this_machine.row("here")
    result = loop.fit(recipe, planner.make(recipe, [shape]), shape, dataset, out)
    rows = heldout_rows(dataset, scoring.GATE_SAMPLES)
    model = gate.check(
        recipe, out, dataset, rows, lambda: loading.exported_model(recipe, out, device_map={"": 0})
    )
    nll, tokens = scoring.heldout_loss(model, rows, 0, batch_size=4)
    return result, float(nll.sum() / tokens.sum())


@pytest.mark.parametrize("pair", ["full none", "lora none", "qlora device_map"])
def test_a_pair_trains_in_bfloat16_and_exports_the_trained_model(pair, tmp_path):
    method, sharding = pair.split()
    changes = {"method": method, "sharding": sharding, "model.dtype": "bfloat16", "hardware.shape": "here"}
    recipe = Recipe.model_validate(
        tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64), changes)
    )
    data.prepare(DataRequest(model=recipe.model, data=recipe.data, fingerprint="x"), tmp_path / "dataset")
    result, reloaded = ranks.run(1, fit, recipe, tmp_path / "dataset", tmp_path / "trained")
    assert result.memory_kind == "GPU memory allocated"
    assert result.steps[-1].memory_bytes > 0
    assert reloaded == pytest.approx(result.heldout_loss, abs=gate.LOSS_BOUND["bfloat16"])


def fit_and_die(recipe, dataset, out):
    record = step_log.Recorder.record

    def record_and_die(self, step, epoch, logs):
        record(self, step, epoch, logs)
        if step == 3:
            kill_once_saved(recipe, 2)

    step_log.Recorder.record = record_and_die
    fit(recipe, dataset, out)


@pytest.mark.parametrize("pair", ["full none", "qlora device_map"])
def test_a_killed_run_goes_on_as_if_nothing_had_been(pair, tmp_path):
    method, sharding = pair.split()
    base, rows, losses = tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64), []
    for name in ("complete", "killed"):
        changes = {
            "method": method,
            "sharding": sharding,
            "model.dtype": "bfloat16",
            "hardware.shape": "here",
        }
        changes |= {"training.max_steps": 4, "checkpoints": {"folder": str(tmp_path / name), "save_steps": 2}}
        recipe = Recipe.model_validate(tiny_recipe(base, rows, changes))
        if not losses:
            data.prepare(
                DataRequest(model=recipe.model, data=recipe.data, fingerprint="x"), tmp_path / "dataset"
            )
        else:
            with pytest.raises(ranks.RankFailed, match="SIGKILL|signal 9|-9"):
                ranks.run(1, fit_and_die, recipe, tmp_path / "dataset", tmp_path / "dead")
        result, _ = ranks.run(1, fit, recipe, tmp_path / "dataset", tmp_path / f"trained {name}")
        assert result.resumed_from_step == (2 if name == "killed" else 0)
        losses.append([step.loss for step in result.steps])
    # Kernels of the backward pass may sum in another order from run to run.
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def sampled():
    """Return what the monitor samples while this GPU has a GiB in use."""
    held = torch.ones(2**28, device="cuda")
    with measurements.GpuMonitor(seconds=0.1) as monitor:
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
