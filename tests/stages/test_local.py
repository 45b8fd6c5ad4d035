"""A run on this machine without Flyte: equal to Flyte's, interrupted and resumed to the bit, its prepared
data kept whole."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from flytune import caches
from flytune.artifacts import lineage
from flytune.data import contract
from flytune.errors import DataError
from flytune.recipe import DataRequest, Recipe
from flytune.stages import local, prepare
from flytune.storage import Storage
from tests.support import interrupted
from tests.support.changed_base import write_teacher
from tests.support.chats import write_rows
from tests.support.pyflyte import pyflyte
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs
from tests.support.waiting import until


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Folders of this test's own for prepared data and results."""
    folder = tmp_path / "caches"
    monkeypatch.setattr(caches, "hub_folder", lambda name: caches.make_folder(folder / name))
    monkeypatch.setenv("FLYTUNE_OUT", str(tmp_path / "artifacts"))
    return folder


def content(folder, **changes):
    return tiny_recipe(tiny_base(folder), write_pairs(folder / "pairs.jsonl", 60), changes)


def weights(folder):
    return (Path(folder) / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_prepared_data_is_used_again_and_made_again_where_it_is_damaged(kept, tmp_path, caplog):
    recipe = Recipe.model_validate(content(tmp_path, **{"training.max_steps": 2}))
    first = local.run(recipe)
    (prepared,) = (kept / "prepared").glob("prepare-*")
    shard = next(prepared.rglob("train/*.parquet"))
    before, written = shard.read_bytes(), shard.stat().st_mtime_ns
    assert weights(local.run(recipe)) == weights(first)
    assert shard.stat().st_mtime_ns == written
    shard.write_bytes(before[:-1])
    assert weights(local.run(recipe)) == weights(first)
    assert shard.read_bytes() == before
    assert [line.getMessage() for line in caplog.records if "damaged" in line.getMessage()] == [
        f"{prepared}: is damaged, and is made again"
    ]


def test_faults_of_the_data_are_left_to_the_training_that_shows_them(tmp_path, caplog):
    rows = [{"prompt": "Repeat.", "completion": f"Word {number % 40}."} for number in range(60)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    request = DataRequest.of(Recipe.model_validate(tiny_recipe(tiny_base(tmp_path), path, {})), "x")
    inputs = {"request": request, "scratch_folder": str(tmp_path)}
    prepared = local.in_worker(local.ThisMachine(tmp_path), "prepare", "", inputs).value
    (fault,) = (check for check in contract.stored(prepared.path).faults if check.name == "duplicates")
    assert fault.found not in caplog.text
    prepare.prepare_data(local.ThisMachine(tmp_path), **inputs)
    assert fault.found in caplog.text, "where nothing is trained"


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_teacher_runs_once_and_is_in_report_and_lineage(share, kept, tmp_path):
    section = {"name": "distill", "teacher_model_name_or_path": str(tmp_path / "teacher"), "loss_top_k": 8}
    section |= {"on_policy": share, "max_completion_length": 16}
    changes = content(tmp_path, objective=section, **{"training.max_steps": 2})
    write_teacher(tmp_path / "tiny", tmp_path / "teacher")
    first = Path(local.run(Recipe.model_validate(changes)))
    (stored,) = (kept / "prepared").glob("reference-*")
    rows = next(stored.rglob("train.parquet"))
    written = rows.stat().st_mtime_ns
    changes["objective"] = section | {"beta": 1.0}
    changes["training"] |= {"learning_rate": 2e-3}
    local.run(Recipe.model_validate(changes))
    assert [*(kept / "prepared").glob("reference-*")] == [stored]
    assert rows.stat().st_mtime_ns == written
    assert "own held-out loss" in (first / "report.html").read_text()
    assert (first / "rollouts.jsonl").is_file() == any(stored.rglob("teacher")) == bool(share)
    (run,) = lineage.of_artifact(Storage(first, "model.name_or_path")).runs
    assert (run.teacher, run.teacher_revision) == (str(tmp_path / "teacher"), None)


def test_a_stage_s_refusal_is_raised_as_it_is_and_leaves_nothing(kept, tmp_path):
    wrong = content(tmp_path)
    (tmp_path / "pairs.jsonl").write_text('{"nothing": 1}\n')
    before = set(Path(tempfile.gettempdir()).glob("flytune-run-*"))
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: no format fits the columns nothing"):
        local.run(Recipe.model_validate(wrong))
    assert set(Path(tempfile.gettempdir()).glob("flytune-run-*")) == before
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.journey
@pytest.mark.parametrize("sharding", ["none", "ddp"])
def test_a_run_that_sigterm_ends_goes_on_to_the_weights_of_pyflyte(sharding, tmp_path):
    shape = "cpu-1" if sharding == "none" else "cpu-2"
    changes = {
        "training.max_steps": 60,
        "checkpoints.save_steps": 50,
        "sharding": sharding,
        "hardware.shape": shape,
    }
    recipe = content(tmp_path, **changes)
    recipe["checkpoints"]["folder"] = str(tmp_path / "kept")
    groups = []

    def end(process):
        groups.append(process.pid)
        os.kill(process.pid, signal.SIGTERM)

    code, said = interrupted.signalled(recipe, tmp_path, "^step 3/", end)
    assert code == 128 + signal.SIGTERM, said
    assert "the same command resumes from it" in said.splitlines()[-1]
    until(lambda: interrupted.has_ended(groups[0]))
    code, said = interrupted.run(recipe, tmp_path)
    assert code == 0, said
    assert "attempt 2: resumes at step " in said

    recipe["checkpoints"]["folder"] = str(tmp_path / "other")
    (other := tmp_path / "pyflyte").mkdir()
    done = pyflyte(recipe, other)
    assert done.returncode == 0, done.stderr
    assert weights(said.splitlines()[-1]) == weights(done.stdout.splitlines()[-1])
