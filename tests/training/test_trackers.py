"""Contract of every tracker, and of each that is installed a real run; none of them reaches a network."""

import os
import re
import sys
from pathlib import Path

import pytest
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from flytune import yaml_core
from flytune.conversion import convert
from flytune.errors import TrainingError
from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.recipe import TRACKER_NAMES, Recipe
from flytune.records import GpuUse
from flytune.training import loop, measurements, step_log, trackers
from tests.support import ranks
from tests.support.tiny import tiny_recipe

REPORTED = {"loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes", "seconds"}
REPORTED |= {"data_seconds", "forward_seconds", "backward_seconds", "update_seconds"}
SECRET = "0123456789abcdef0123456789abcdef01234567"


def recipe_for(inputs, tracker, folder, **changes):
    changes = {
        "tracking": {"report_to": [tracker], "project": "additions"},
        "evaluation.eval_steps": 2,
    } | changes
    changes |= {"checkpoints.folder": str(folder / "runs")}
    return Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))


def fit(recipe, inputs, folder, environment):
    os.environ |= environment
    os.chdir(folder)
    plan = planner.make(recipe)
    return loop.fit(recipe, plan, shape_named(plan.shape), inputs / "dataset", folder / "out")


@pytest.fixture(params=TRACKER_NAMES)
def tracker(request):
    return trackers.TRACKERS[request.param]


def test_transformers_has_its_callback_and_its_package(tracker):
    assert {*trackers.TRACKERS} == {*TRACKER_NAMES}
    assert type(tracker).name in INTEGRATION_TO_CALLBACK
    assert tracker.requirement


def test_a_tracker_that_is_missing_is_named_before_anything_is_loaded(tracker, inputs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, tracker.name, None)
    recipe = recipe_for(
        inputs, tracker.name, tmp_path, **{"model.name_or_path": str(tmp_path / "never read")}
    )
    message = (
        f"tracking.report_to: {tracker.name} is not installed here, so the run does not start; "
        f"install {tracker.requirement} "
    )
    with pytest.raises(TrainingError, match=re.escape(message)):
        trackers.arguments(recipe, tmp_path)


def test_it_resumes_a_run_by_variables_that_the_next_run_does_not_have(tracker, monkeypatch):
    before = dict(os.environ)
    assert (
        tracker.variables("additions", Path("runs/one")).keys().isdisjoint(tracker.resume_variables("id-1"))
    )
    trackers.resume_runs({tracker.name: "id-1"})
    assert dict(os.environ) == before | tracker.resume_variables("id-1")
    trackers.finish([])
    assert dict(os.environ) == before


def test_without_a_run_it_has_no_id_and_nothing_to_close(tracker):
    library = pytest.importorskip(tracker.name)
    assert tracker.run_id(library) is None
    tracker.close()


def test_files_of_other_tools_with_it_are_converted(tracker, tmp_path):
    (tmp_path / "axolotl.yaml").write_text(
        "base_model: a/b\n"
        f"datasets: [{{path: a/c, type: alpaca}}]\n"
        f"use_{tracker.name}: true\n"
        "learning_rate: 1e-4\n"
    )
    (tmp_path / "run.sh").write_text(
        f"trl sft --model_name_or_path a/b --dataset_name a/c --report_to {tracker.name}\n"
    )
    for file in ("axolotl.yaml", "run.sh"):
        recipe = Recipe.model_validate(yaml_core.load(convert(str(tmp_path / file))))
        assert recipe.tracking.report_to == [tracker.name]


def test_a_folder_of_runs_is_no_package(inputs, tmp_path, monkeypatch):
    (tmp_path / "tensorboard").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    with pytest.raises(TrainingError, match="tensorboard is not installed here"):
        trackers.arguments(recipe_for(inputs, "tensorboard", tmp_path), tmp_path)


def test_without_trackers_nothing_is_reported(inputs, tmp_path):
    recipe = Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl"))
    assert trackers.arguments(recipe, tmp_path) == {"report_to": "none", "run_name": "tiny"}
    trackers.finish([])


def fit_with_gpu_figures(recipe, inputs, folder, environment):
    """Fit with a mock of the monitor's samples; the second step is too short for one."""
    uses = iter([GpuUse(utilization=40, power_watts_max=300), None, GpuUse(utilization=60)])
    measurements.GpuMonitor.read = lambda self: next(uses)
    return fit(recipe, inputs, folder, environment)


def test_tensorboard_gets_each_step(inputs, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = recipe_for(inputs, "tensorboard", tmp_path)
    result = ranks.run(1, fit_with_gpu_figures, recipe, inputs, tmp_path, {})
    (folder,) = (tmp_path / "runs" / "tensorboard").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {f"train/{name}" for name in REPORTED} | {"eval/loss", "eval/seconds"} <= set(
        events.Tags()["scalars"]
    )
    reported = [(event.step, event.value) for event in events.Scalars("train/forward_seconds")]
    assert reported == [(step.step, pytest.approx(step.forward_seconds)) for step in result.steps]
    assert [event.step for event in events.Scalars("eval/loss")] == [2, 3]
    assert [(event.step, event.value) for event in events.Scalars("train/gpu/utilization")] == [
        (1, 40),
        (3, 60),
    ]
    assert [event.step for event in events.Scalars("train/gpu/power_watts_max")] == [1]
    assert [step.gpu and step.gpu.utilization for step in result.steps] == [40, None, 60]
    assert step_log.read(tmp_path / "out" / "steps.jsonl") == result.steps


def wandb_records(file):
    """Read a .wandb file: LevelDB's log format (blocks of 32 KiB; checksum, length, kind) after a head of 7
    bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts, records = file.read_bytes(), 7, b"", []
    while at < len(content):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        # 1: a complete record, 4: the last part of one.
        if kind in (1, 4):
            records.append(Record.FromString(parts))
            parts = b""
    return records


def wandb_fit(recipe, inputs, folder, environment):
    result = fit(recipe, inputs, folder, environment)
    import wandb

    return result, wandb.run is None


@pytest.mark.slow
def test_weights_and_biases_gets_each_step_and_no_secret(inputs, tmp_path):
    pytest.importorskip("wandb")
    environment = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_API_KEY": SECRET,
        "HF_TOKEN": f"hf_{SECRET}",
    }
    result, is_closed = ranks.run(
        1, wandb_fit, recipe_for(inputs, "wandb", tmp_path), inputs, tmp_path, environment
    )
    assert is_closed
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert SECRET.encode() not in b"".join(
        path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    )
    records = wandb_records(file)
    (run, *_) = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.display_name) == ("additions", "tiny")
    reported = [
        {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        for record in records
    ]
    reported = [row for row in reported if "train/loss" in row]
    assert {f"train/{name}" for name in REPORTED} <= set(reported[0])
    assert [float(row["train/loss"]) for row in reported] == pytest.approx(
        [step.loss for step in result.steps]
    )
    assert [float(row["eval/loss"]) for row in reported if "eval/loss" in row] == pytest.approx(
        [step.eval_loss for step in result.steps if step.eval_loss]
    )


def test_weights_and_biases_without_a_key_is_refused_before_anything_is_loaded(inputs, tmp_path):
    pytest.importorskip("wandb")
    recipe = recipe_for(inputs, "wandb", tmp_path, **{"model.name_or_path": str(tmp_path / "never read")})
    environment = {
        "HOME": str(tmp_path),
        "NETRC": str(tmp_path / "none"),
        "WANDB_SILENT": "true",
        "WANDB_API_KEY": "",
    }
    with pytest.raises(
        ranks.RankFailed,
        match="wandb cannot be reported to, so the run does not start: no key was found; set",
    ):
        ranks.run(1, set_up, recipe, tmp_path, environment)


def set_up(recipe, folder, environment):
    os.environ |= environment
    trackers.arguments(recipe, folder)


def test_mlflow_gets_each_step(inputs, tmp_path):
    pytest.importorskip("mlflow")
    store = tmp_path / "store"
    environment = {"MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    result = ranks.run(1, fit, recipe_for(inputs, "mlflow", tmp_path), inputs, tmp_path, environment)
    names = [path.read_text() for path in store.glob("*/meta.yaml")]
    assert any("name: additions" in text for text in names)
    (metrics,) = {path.parent for path in store.glob("*/*/metrics/loss")}
    # One file a metric, one line a value: time, value, step.
    reported = {
        path.name: [line.split() for line in path.read_text().splitlines()] for path in metrics.iterdir()
    }
    assert REPORTED | {"eval_loss"} <= set(reported)
    losses = [float(value) for _, value, _ in reported["loss"]]
    assert losses == pytest.approx([step.loss for step in result.steps])
    assert "run_name: tiny" in (metrics.parent / "meta.yaml").read_text()


def test_mlflow_that_does_not_answer_is_refused_before_anything_is_loaded(inputs, tmp_path):
    pytest.importorskip("mlflow")
    recipe = recipe_for(inputs, "mlflow", tmp_path, **{"model.name_or_path": str(tmp_path / "never read")})
    environment = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    with pytest.raises(
        ranks.RankFailed,
        match="mlflow cannot be reported to, so .*: API request to http://127.0.0.1:9.*; set MLF",
    ):
        ranks.run(1, set_up, recipe, tmp_path, environment)
