"""Two pods make one two-node run: the training operator's variables, storage that both see, and no disk in common."""

import json

import pytest

from flytune import planner, training
from flytune.recipe import Recipe
from flytune.records import TrainingResult
from flytune.shapes import shape_named
from tests import ranks
from tests.flyteadmin import flyteadmin
from tests.laptop import checkout, submit
from tests.propeller import Run
from tests.tiny import tiny_base, tiny_recipe, write_pairs


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


def fit(recipe, dataset, out):
    plan = planner.make(recipe, samples=64)
    return training.fit(recipe, plan, shape_named(plan.shape), dataset, out)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero2", "fsdp"])
def test_two_pods_make_one_run(sharding, tmp_path):
    inputs = tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64)
    changes = {"sharding": sharding, "checkpoints": {"save_steps": 2}}
    with flyteadmin(tmp_path / "home") as (admin, storage):
        recipe = tiny_recipe(*inputs, changes | {"hardware.shape": "cpu-1x2"})
        name = submit(checkout(tmp_path / "laptop"), tmp_path / "home", admin, recipe)
        run = Run(admin, name, tmp_path / "run", storage)
        prepared = run.until("prepare_data")["o0"].scalar.blob.uri
        trained = run.until("train")["o0"].scalar.blob.uri
        dataset, two = admin.fetch(prepared, tmp_path / "dataset"), admin.fetch(trained, tmp_path / "two")
        checkpoints = admin.keys("flytune-checkpoints/")
        exports = [key for key in admin.keys("ab/") if key.endswith("model.safetensors")]
    assert sorted(run.pods("train_cpu_1x2")) == [0, 1]
    assert TrainingResult.read(two / "training.json").world_size == 2
    assert len(exports) == 1
    assert {key.split("/")[2].split("-")[0] for key in checkpoints} >= {"2", "3"}
    alone = Recipe.model_validate(tiny_recipe(*inputs, {"sharding": sharding, "hardware.shape": "cpu-2"}))
    ranks.run(2, fit, alone, dataset, tmp_path / "one")
    assert losses(two) == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
