"""Tests of two-node runs in two pods, with the training operator's variables and shared storage, but no shared disk."""

import json

import msgpack
import pytest

from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.records import TrainingResult
from flytune.selftest import Matrix
from flytune.training import loop
from tests.support import ranks
from tests.support.flyteadmin import flyteadmin
from tests.support.laptop import WHERE, checkout, pyflyte, submit
from tests.support.propeller import Run
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


def fit(recipe, dataset, out):
    plan = planner.make(recipe, samples=64)
    return loop.fit(recipe, plan, shape_named(plan.shape), dataset, out)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero2", "fsdp"])
def test_two_pods_are_one_run(sharding, tmp_path):
    inputs = tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64)
    changes = {"sharding": sharding, "checkpoints": {"save_steps": 2}}
    with flyteadmin(tmp_path / "home") as (admin, storage):
        recipe = tiny_recipe(*inputs, changes | {"hardware.shape": "cpu-1x2"})
        name = submit(checkout(tmp_path / "laptop"), tmp_path / "home", admin, recipe)
        run = Run(admin, name, tmp_path / "run", storage)
        prepared = run.until("prepare_data")["o0"].scalar.blob.uri
        # Longer than the pod without rank 0 would run if it did not wait.
        admin.bytes_per_second = 200_000
        trained = run.until("train")["o0"].scalar.blob.uri
        dataset, two = admin.fetch(prepared, tmp_path / "dataset"), admin.fetch(trained, tmp_path / "two")
        checkpoints = admin.keys("flytune-checkpoints/")
        exports = [key for key in admin.keys("ab/") if key.endswith("model.safetensors")]
    assert sorted(run.pods("train_cpu_1x2")) == [0, 1]
    assert TrainingResult.read(two / "training.json").world_size == 2
    # Of each attempt, one pod exports; a failed attempt is retried, as on a cluster.
    attempts = [key.split("/")[1] for key in exports]
    assert attempts
    assert len(set(attempts)) == len(attempts)
    assert {key.split("/")[2].split("-")[0] for key in checkpoints} >= {"2", "3"}
    alone = Recipe.model_validate(tiny_recipe(*inputs, {"sharding": sharding, "hardware.shape": "cpu-2"}))
    ranks.run(2, fit, alone, dataset, tmp_path / "one")
    assert losses(two) == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


@pytest.mark.slow
def test_two_pods_fill_one_matrix_of_the_selftest(tmp_path):
    with flyteadmin(tmp_path / "home") as (admin, storage):
        what = ["workflows/selftest.py", "selftest", "--shape", "cpu-1x2", "--pairs", "full/ddp,lora/fsdp,full/none"]
        laptop = checkout(tmp_path / "laptop")
        done = pyflyte(laptop, tmp_path / "home", "run", "--remote", "--copy", "all", *WHERE, *what)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        run = Run(admin, next(iter(admin.executions)), tmp_path / "run", storage)
        found = run.until("selftest")["o0"].scalar.binary.value
    assert sorted(run.pods("selftest_cpu_1x2")) == [0, 1]
    matrix = Matrix.model_validate(msgpack.unpackb(found))
    assert matrix.machine.startswith("2 nodes of 1 ranks on a CPU")
    assert [(cell.sharding, cell.state) for cell in matrix.cells] == [("ddp", "equal"), ("fsdp", "equal"), ("none", "equal")]
    assert {one.layout[-2:] for cell in matrix.cells[:2] for one in cell.distances} == {"x2"}
