"""Test of the complete path: two adapters are trained, evaluated, published to a mock hub, fetched, and used
together."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flytune.records import Manifest, Metrics
from tests.support import mock_hub
from tests.support.classified import write_classified
from tests.support.paths import ROOT
from tests.support.preferences import write_labelled, write_preferences
from tests.support.pyflyte import pyflyte
from tests.support.queries import write_queries
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

PROMPTS = [
    {"prompt": "Add 1 and"},
    {"prompt": "Add 1 and", "adapter": "other"},
    {"prompt": "Add 2 and", "adapter": "base"},
]
LEFT_BEHIND = {
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29611",
    "RANK": "0",
    "WORLD_SIZE": "2",
}
"""What torchrun sets; with two of them alone, transformers would wait for the second rank."""


def write_task(folder):
    """Write a harness task of six questions with two choices."""
    folder.mkdir()
    rows = [{"question": f"{n} and {n}?", "choices": [str(2 * n), "none"], "answer": 0} for n in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": "twice", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}}}
    task |= {"test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}"}
    task |= {"doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    task |= {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}
    (folder / "twice.yaml").write_text(yaml.safe_dump(task))
    return folder


def ran(seen, *command):
    program, *rest = command
    start = (
        [sys.executable, "-m", "flytune.cli"]
        if program == "flytune"
        else [str(Path(sys.executable).with_name(program))]
    )
    done = subprocess.run(
        [*start, *map(str, rest)], cwd=ROOT, env=seen, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.mark.journey
@pytest.mark.parametrize("objective", ["sft", "dpo", "kto", "reward", "classify", "distill", "embed"])
def test_a_run_that_holds_nothing_out_stores_a_model_and_says_that_nothing_was_measured(objective, tmp_path):
    writers = {
        "sft": write_pairs,
        "distill": write_pairs,
        "kto": write_labelled,
        "classify": write_classified,
        "embed": write_queries,
    }
    write = writers.get(objective, write_preferences)
    changes = {
        "objective.name": objective,
        "method": "lora",
        "data.heldout_fraction": 0,
        "training.warmup_steps": 20,
        "publish.address": str(tmp_path / "out"),
    }
    if objective == "distill":
        changes["objective.teacher_model_name_or_path"] = str(tmp_path / "tiny")
    if objective == "dpo":
        changes["objective.precompute_ref_log_probs"] = True
    recipe = tiny_recipe(tiny_base(tmp_path), write(tmp_path / "rows.jsonl", 40), changes)
    done = pyflyte(recipe, tmp_path, LEFT_BEHIND, forks=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        done.stderr.count(
            f"left out of the environment, because the recipe decides it: {', '.join(LEFT_BEHIND)}"
        )
        == 1
    )
    assert (
        done.stdout.count(
            "tiny: training.warmup_steps: 20 is 20 steps of warm-up in a run of 3 steps: the rate rises"
        )
        == 1
    )
    (artifact,) = (tmp_path / "out").iterdir()
    metrics = Metrics.read(artifact / "metrics.json")
    assert (metrics.samples, metrics.figures, metrics.is_better) == (0, [], False)
    assert Manifest.read(artifact / "manifest.json").heldout.samples == 0
    for page in ("report.html", "README.md"):
        assert (
            "No samples were held out, so nothing says whether tuning helped."
            in (artifact / page).read_text()
        )
    assert "model-index" not in (artifact / "README.md").read_text()


@pytest.mark.slow
def test_two_adapters_from_recipe_to_answers(tmp_path):
    base, data, task = (
        tiny_base(tmp_path),
        write_pairs(tmp_path / "pairs.jsonl", 64),
        write_task(tmp_path / "tasks"),
    )
    fetched = {}
    with mock_hub.running() as hub:
        for name, rate in (("first", 1e-3), ("other", 3e-2)):
            home = tmp_path / name
            home.mkdir()
            changes = {
                "name": name,
                "method": "lora",
                "training.learning_rate": rate,
                "publish.address": f"hf://ada/{name}",
            }
            changes |= {
                "evaluation.tasks": ["twice"],
                "evaluation.include_path": str(task),
                "evaluation.task_shards": 2,
            }
            seen = mock_hub.environment(hub, str(home)) | {
                "HOME": str(home),
                "TMPDIR": str(home),
                "PYTHONPATH": str(ROOT),
                "FLYTUNE_OUT": str(tmp_path / "results"),
            }
            done = pyflyte(tiny_recipe(base, data, changes), home, mock_hub.environment(hub, str(home)))
            assert done.returncode == 0, done.stderr[-3000:]
            (revision,) = hub.repositories[f"ada/{name}"].tags
            fetched[name] = tmp_path / f"{name}-fetched"
            ran(seen, "flytune", "fetch", f"hf://ada/{name}@{revision}", fetched[name])
    for name, artifact in fetched.items():
        (score,) = Metrics.read(artifact / "metrics.json").tasks
        assert (score.task, score.documents) == ("twice", 6)
        assert (
            json.loads((artifact / "harness" / "tuned.json").read_text())["results"]["twice"]["acc,none"]
            == score.tuned
        )
        assert (artifact / "adapter_model.safetensors").is_file()
        assert f"hf://ada/{name}" in (artifact / "recipe.yaml").read_text()

    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    infer = [
        "pyflyte",
        "run",
        "workflows/infer.py",
        "infer",
        "--artifact",
        fetched["first"],
        "--shape",
        "cpu-1",
        "--shards",
        "2",
    ]
    infer += [
        "--prompts",
        tmp_path / "prompts.jsonl",
        "--adapters",
        json.dumps({"other": str(fetched["other"])}),
    ]
    ran(
        seen, *infer, "--scratch_folder", tmp_path / "kept", "--generation", json.dumps({"max_new_tokens": 8})
    )
    (answers,) = (tmp_path / "results").glob("answers-*/answers.jsonl")
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row.get("adapter") for row in rows] == [None, "other", "base"]
    assert rows[0]["answer"] != rows[1]["answer"]
    assert all(row["answer_tokens"] <= 8 for row in rows)
