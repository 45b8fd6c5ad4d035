"""Runs of both faces on this machine: equal weights, one's checkpoint resumed by the other, killed
workers."""

import json
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from flyte.io import File

from flyte2.runtime import live
from flytune.files import sha256_of
from flytune.recipe import Recipe
from flytune.records import Metrics
from flytune.stages.ranks import StageFailed
from tests.support import fork_server
from tests.support.flyte2 import FIRST, run1, run2
from tests.support.preferences import write_preferences
from tests.support.pyflyte import finetuned
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs


def weights(artifact):
    """Return the hashes of an artifact's weights."""
    weights = {path.name: sha256_of(path) for path in Path(artifact).glob("*.safetensors")}
    assert weights
    return weights


def recipe_of(folder, **changes):
    write = write_preferences if changes.get("objective") else write_pairs
    base, rows = tiny_base(folder), write(folder / "pairs.jsonl", 64)
    return Recipe.model_validate(tiny_recipe(base, rows, changes))


@pytest.mark.journey
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "lora"},
        {"sharding": "zero2", "hardware.shape": "cpu-2"},
        {"objective": {"name": "dpo"}},
    ],
    ids=["full", "lora", "zero2", "dpo"],
)
def test_both_faces_make_the_same_weights(changes, home2, monkeypatch):
    from flyte2.finetune import finetune

    recipe, pages = recipe_of(home2, **changes), []
    monkeypatch.setattr(live, "SECONDS", 0.05)
    monkeypatch.setattr(live, "_show", pages.append)
    other = run2(finetune, recipe=recipe)
    assert weights(other.path) == weights(fork_server.call(finetuned, recipe))
    # Its report is shown while it trains.
    assert "tiny trains" in pages[0]
    assert "<polyline" in pages[0]


SAVES = {"method": "lora", "training.max_steps": 12, "checkpoints.save_steps": 2}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Hashes of the weights of SAVES."""
    return weights(run1(recipe_of(tmp_path_factory.mktemp("uninterrupted"), **SAVES)))


@contextmanager
def killed_after_a_save(folder, worker):
    """Kill a worker's process once a run has a complete checkpoint below a folder."""
    over = threading.Event()

    def strike():
        while not over.wait(0.05):
            if any(folder.glob("*/[0-9]*/manifest.json")):
                worker._process.kill()
                killed.append(worker._process.pid)
                return

    killed = []
    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        assert killed


@pytest.fixture
def printed(capfd):
    """Capture what a test's workers print; one that an earlier test has started writes into that test's
    capture."""
    from flyte2.runtime import local

    for worker in (FIRST, local.WORKER):
        worker.end()
    return capfd


@pytest.mark.slow
def test_a_killed_worker_is_another_attempt_that_resumes(uninterrupted, home2):
    from flyte2.finetune import finetune
    from flyte2.runtime import local

    with killed_after_a_save(home2 / "checkpoints", local.WORKER):
        made = run2(finetune, recipe=recipe_of(home2, **SAVES))
    assert weights(made.path) == uninterrupted


@pytest.mark.slow
def test_a_run_that_began_on_one_face_resumes_on_the_other(uninterrupted, home2, printed):
    from flyte2.parts import resume

    recipe = recipe_of(home2, **SAVES)
    with killed_after_a_save(home2 / "checkpoints", FIRST), pytest.raises(StageFailed, match="SIGKILL"):
        run1(recipe)
    made = run2(resume, recipe=recipe)
    assert "attempt 2: resumes at step " in printed.readouterr().out
    assert weights(made.path) == uninterrupted


@pytest.mark.slow
def test_each_part_of_a_run_runs_alone(home2, printed):
    from flyte2.parts import evaluate_only, export_only, plan_only, prepare_only

    recipe = recipe_of(home2, **SAVES)
    assert run2(plan_only, recipe=recipe).shape == "cpu-1"
    assert (Path(run2(prepare_only, recipe=recipe).path) / "manifest.json").is_file()
    with killed_after_a_save(home2 / "checkpoints", FIRST), pytest.raises(StageFailed, match="SIGKILL"):
        run1(recipe)
    artifact = run2(export_only, recipe=recipe)
    assert "trained 0 steps" in printed.readouterr().out
    stored = Metrics.model_validate_json((Path(artifact.path) / "metrics.json").read_text())
    assert run2(evaluate_only, recipe=recipe, artifact=artifact).figures == stored.figures


@pytest.mark.slow
def test_a_point_fails_alone_and_the_others_are_compared(home2):
    from flyte2.sweep import sweep

    recipe = recipe_of(home2, method="lora", **{"training.max_steps": 2, "checkpoints.save_steps": 1})
    folders, rate = {"checkpoints.folder": "/proc/none"}, "training.learning_rate"
    made = run2(
        sweep,
        recipe=recipe,
        changes=[{rate: 1e-3, "checkpoints.folder": str(home2)}, {rate: 2e-3, **folders}],
    )
    found = json.loads((Path(made.path) / "sweep.json").read_text())
    assert [bool(one["artifact"]) for one in found["outcomes"]] == [True, False]
    assert "train failed: " in found["outcomes"][1]["reason"]
    assert "/proc/none" in found["outcomes"][1]["reason"]


@pytest.mark.slow
def test_a_model_answers_prompts_in_parts(home2):
    from flyte2.finetune import finetune
    from flyte2.infer import infer

    tuned = run2(finetune, recipe=recipe_of(home2, **{"training.max_steps": 2}))
    prompts = home2 / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Add {number} and 1."}) + "\n" for number in range(4)))
    made = run2(infer, artifact=tuned, prompts=File(path=str(prompts)), shape="cpu-1", shards=2)
    assert len((Path(made.path) / "answers.jsonl").read_text().splitlines()) == 4
