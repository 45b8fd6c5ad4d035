"""Tests of what a driver does between stages."""

import asyncio

import fsspec
import pytest
from flyte.errors import OOMError, RuntimeUserError

from flyte2 import wiring
from flyte2.runtime.file_systems import fsspec_s_own
from flyte2.runtime.orchestrator import Flyte2
from flytune.recipe import Recipe
from tests.support.recipes import content
from tests.support.stages import plan_for


@pytest.fixture
def values():
    recipe = Recipe.model_validate(content(hardware={"shape": "auto"}))
    plan = plan_for(recipe).model_copy(
        update={"shape": "t4-1", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    )
    return {"recipe": recipe, "plan": plan, "route": "t4-1", "shape": "t4-1", "export_only": False}


def train(values, monkeypatch, *errors):
    """Return what training makes where its attempts raise `errors` first, and the micro batches that were
    tried."""
    tried, left = [], list(errors)

    async def once(given):
        tried.append(
            (given["plan"].per_device_train_batch_size, given["route"], given["recipe"] is values["recipe"])
        )
        if left:
            raise left.pop(0)
        return {"trained": "folder"}

    async def planned(recipe, export_only):
        size = recipe.training.per_device_train_batch_size
        other = values["plan"].model_copy(update={"key": "another", "per_device_train_batch_size": size})
        return {"plan": other, "route": "t4-1", "shape": "t4-1"}

    monkeypatch.setattr(wiring, "_train_once", once)
    monkeypatch.setattr(wiring, "planned", planned)
    return asyncio.run(wiring._train(values)), tried


def test_out_of_gpu_memory_goes_to_the_next_candidate_once_and_says_so(values, monkeypatch, capsys):
    made, tried = train(values, monkeypatch, OOMError("OOMOutOfGPUMemory", "full"))
    assert tried == [(4, "t4-1", True), (2, "t4-1", True)]
    assert made["trained"] == "folder"
    assert made["plan"].key == values["plan"].key
    assert (
        "out of GPU memory on t4-1 with 4 samples a pass; once more on t4-1 with 2" in capsys.readouterr().out
    )
    train(values, monkeypatch, OOMError("OOMKilled", "exit code 137"))
    assert (
        "out of host memory on t4-1 with 4 samples a pass; once more on t4-1 with 2"
        in capsys.readouterr().out
    )
    with pytest.raises(OOMError, match="again"):
        train(values, monkeypatch, OOMError("OOM", "full"), OOMError("OOM", "again"))


def test_another_failure_ends_the_run(values, monkeypatch):
    with pytest.raises(RuntimeUserError, match="a bug"):
        train(values, monkeypatch, RuntimeUserError("RunFailed", "a bug"))


@pytest.mark.parametrize(
    ("base", "shared"),
    [
        ("s3://bucket/raw/org/p/d/run/", "s3://bucket/raw/flytune-checkpoints"),
        ("s3://bucket/p/d/run", "s3://bucket/flytune-checkpoints"),
        ("gs://bucket/own/prefix/", "gs://bucket/own/prefix/flytune-checkpoints"),
    ],
)
def test_runs_share_what_is_before_their_names(base, shared):
    """Each action's own data begins with another folder."""
    for shard in ("1a", "z9"):
        action = Flyte2(f"s3://bucket/{shard}/p/d/run/a0/1", base, ("org", "p", "d", "run"), "run", "a0")
        assert action.shared_address("checkpoints") == shared


def test_an_action_stores_and_fetches_folders_and_files_by_fsspec_s_own_file_systems(bucket, tmp_path):
    action = Flyte2(f"{bucket}/raw/run", f"{bucket}/raw/run", ("run",), "run", "a1")
    (tmp_path / "made" / "below").mkdir(parents=True)
    (tmp_path / "made" / "below" / "a.txt").write_text("a")
    of_the_sdk = fsspec.get_filesystem_class("s3")
    with fsspec_s_own():
        assert fsspec.get_filesystem_class("s3").__module__ == "s3fs.core"
        address = action.store(tmp_path / "made", action.new_address())
        action.fetch(address, tmp_path / "got", is_folder=True)
        action.fetch(f"{address}/below/a.txt", tmp_path / "one.txt")
        for is_folder in (True, False):
            with pytest.raises(FileNotFoundError):
                action.fetch(f"{bucket}/nothing", tmp_path / "none", is_folder)
    assert fsspec.get_filesystem_class("s3") is of_the_sdk
    assert (tmp_path / "got" / "below" / "a.txt").read_text() == "a"
    assert (tmp_path / "one.txt").read_text() == "a"
    assert (
        action.attempts_address()
        != Flyte2(action.raw, action.base, action.scope, action.run, "a2").attempts_address()
    )
