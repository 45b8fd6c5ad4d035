"""Tests of this checkout's tasks in simulated pods (tests/support/pods.py); test_remote.py runs registered
tasks."""

from pathlib import Path

import pytest

from flytune.recipe import Recipe
from flytune.records import TrainingResult
from tasks.plan import make_plan
from tasks.prepare import prepare_data
from tasks.train import TRAIN
from tests.support.pods import pod
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs


@pytest.fixture
def inputs(tmp_path):
    return tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64)


@pytest.mark.slow
def test_plan_prepare_and_an_elastic_train_pod(inputs, tmp_path):
    recipe = Recipe.model_validate(tiny_recipe(*inputs, {"sharding": "zero2", "hardware.shape": "cpu-2"}))
    planned = pod(make_plan, tmp_path / "plan", recipe=recipe)
    assert planned["route"] == planned["shape"] == "cpu-2"
    dataset = pod(
        prepare_data,
        tmp_path / "prepare",
        request=planned["request"],
        scratch_folder=planned["scratch_folder"],
    )["o0"]
    trained = pod(TRAIN["cpu-2"], tmp_path / "train", recipe=recipe, plan=planned["plan"], dataset=dataset)[
        "o0"
    ]
    folder = Path(trained.download())
    assert TrainingResult.read(folder / "training.json").world_size == 2
    assert (folder / "model" / "model.safetensors").is_file()


def test_a_pod_s_error_reaches_the_console_as_our_text(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "abc")
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_PROJECT", "p")
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_DOMAIN", "d")
    monkeypatch.setenv("HOSTNAME", "abc-n0-0")
    # The pod's own, which is not PROJECT-DOMAIN everywhere.
    monkeypatch.setenv("FLYTUNE_NAMESPACE", "flyte")
    recipe = Recipe.model_validate(tiny_recipe(*inputs, {"method": "full", "sharding": "device_map"}))
    error = pod(make_plan, tmp_path / "plan", recipe=recipe).error
    first, *others = error.message.partition("\n\n")[0].splitlines()
    assert first.startswith("make_plan failed: ")
    assert (
        "method full with sharding device_map: a 16-bit model spread by layers"
        in error.message.partition("what to do: ")[0]
    )
    assert others[-2:] == ["what to do: as the message says", "log: kubectl logs --namespace flyte abc-n0-0"]
    assert error.message.partition("\n\n")[2].startswith("Traceback (most recent call last):")


def test_unreadable_inputs_reach_the_console_as_a_sentence_too(inputs, tmp_path):
    recipe = Recipe.model_validate(tiny_recipe(*inputs))
    # Pods alone get Flytune's text of errors: other processes that import the tasks are left as they are.
    in_pod = {"FLYTE_INTERNAL_EXECUTION_ID": "f1"}
    error = pod(
        make_plan, tmp_path / "plan", seen=in_pod, recipe=recipe.model_copy(update={"name": "no name"})
    ).error
    assert error.message.startswith("make_plan failed: ")
    assert "what to do: " in error.message
