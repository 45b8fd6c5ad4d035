"""Real runs that lose their machines and resume, from a folder and from S3."""

import logging
import os
import re
import shutil
from pathlib import Path

import pytest

from flytune import data
from flytune.errors import StorageError
from flytune.planning import planner
from flytune.training import checkpoints
from flytune.training.checkpoints import saver
from flytune.training.checkpoints.ledger import Checkpoint, Ledger
from tests.support import ranks
from tests.support.saved_runs import fit, fit_and_die_in_the_export, recipe_for


def killed_and_resumed(recipe, inputs, folder, nodes=1, between=lambda: None):
    """Return the result of a run that is killed at step 3 and started again, and the losses of one that is
    never killed."""
    world_size = planner.make(recipe).world_size
    calm = recipe.model_copy(
        update={"checkpoints": recipe.checkpoints.model_copy(update={"save_steps": None})}
    )
    losses = [step.loss for step in ranks.run(world_size, fit, calm, inputs, folder / "calm", nodes).steps]
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(world_size, fit, recipe, inputs, folder / "killed", nodes, 3)
    between()
    return ranks.run(world_size, fit, recipe, inputs, folder / "resumed", nodes), losses


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(inputs, tmp_path):
    recipe = recipe_for(inputs, "ddp", tmp_path / "kept", **{"evaluation.eval_steps": 2})

    def damage():
        (newest,) = tmp_path.glob("kept/*/2-*")
        checkpoint = Checkpoint.read(newest / "manifest.json")
        assert checkpoint.eval_loss is not None
        assert (checkpoint.sharding, checkpoint.world_size) == ("ddp", 2)
        names = {stored.file for stored in checkpoint.files}
        assert names >= {
            "model.safetensors",
            "optimizer.pt",
            "scheduler.pt",
            "rng_state_0.pth",
            "rng_state_1.pth",
        }
        assert names >= {"trainer_state.json", "steps.jsonl"}
        content = bytearray((newest / "optimizer.pt").read_bytes())
        content[len(content) // 2] ^= 1
        (newest / "optimizer.pt").write_bytes(content)

    resumed, losses = killed_and_resumed(recipe, inputs, tmp_path, between=damage)
    assert resumed.resumed_from_step == 1
    assert [step.loss for step in resumed.steps] == losses
    checkpoints.clear(recipe, data.read_manifest(inputs / "dataset"), resumed)
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "optim"),
    [
        ("none", "adafactor"),
        ("fsdp", "paged_adamw_32bit"),
        pytest.param("none", "paged_lion_8bit", marks=pytest.mark.slow),
        pytest.param("zero2", "lion_32bit", marks=pytest.mark.slow),
    ],
)
def test_optimizers_resume_with_their_states(sharding, optim, inputs, tmp_path):
    resumed, losses = killed_and_resumed(
        recipe_for(inputs, sharding, tmp_path / "kept", **{"training.optim": optim}), inputs, tmp_path
    )
    # The update of step 3 is the first that the states of the steps before it change.
    assert resumed.resumed_from_step == 2
    assert [step.loss for step in resumed.steps] == losses


@pytest.mark.slow
def test_nodes_without_a_common_disk_resume_from_s3(inputs, tmp_path, bucket):
    import boto3
    import s3fs

    recipe = recipe_for(inputs, "fsdp", f"{bucket}/kept")

    def look():
        files = [
            path.partition("/2-")[2] for path in s3fs.S3FileSystem().find("models/kept") if "/2-" in path
        ]
        assert {name.rpartition("/")[2] for name in files} >= {"part-0.json", "part-1.json", "manifest.json"}
        assert len([name for name in files if name.endswith(".distcp")]) == 4
        # The next attempts do not use the files that remain on the nodes' disks.
        shutil.rmtree(recipe.checkpoints.home)

    resumed, losses = killed_and_resumed(recipe, inputs, tmp_path, nodes=2, between=look)
    assert resumed.resumed_from_step >= 2
    assert [step.loss for step in resumed.steps] == losses
    assert boto3.client("s3").list_objects_v2(Bucket="models", Prefix="kept").get("Contents"), (
        "they are kept until the artifact is stored"
    )
    checkpoints.clear(recipe, data.read_manifest(inputs / "dataset"), resumed)
    assert not boto3.client("s3").list_objects_v2(Bucket="models", Prefix="kept").get("Contents")
    assert not list(Path(recipe.checkpoints.home).glob("*/attempt-*"))


@pytest.mark.slow
def test_zero_on_nodes_with_a_common_folder(inputs, tmp_path):
    recipe = recipe_for(inputs, "zero2", tmp_path / "kept", **{"checkpoints.name": "by-name"})
    resumed, losses = killed_and_resumed(recipe, inputs, tmp_path, nodes=2)
    assert resumed.resumed_from_step >= 2
    assert [step.loss for step in resumed.steps] == losses


def full_disk(recipe, inputs, out):
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=10)
    fit(recipe, inputs, out)


def test_a_disk_without_room_ends_the_run_before_anything_is_half_written(inputs, tmp_path):
    said = (
        r"2 checkpoints in a row were not stored: .*node-0: 10 bytes are free, a checkpoint has \d.*; "
        r"the run stops,"
    )
    with pytest.raises(ranks.RankFailed, match=said + " and resumes from step 1 when"):
        ranks.run(1, full_disk, recipe_for(inputs, "none", tmp_path / "kept"), inputs, tmp_path / "out")
    assert [path.name[0] for path in tmp_path.glob("kept/*/*/manifest.json")] == ["m"]


def half_written(recipe, inputs, out):
    import torch

    def full(*arguments, **named):
        shutil.disk_usage = lambda path: usage(path)._replace(free=10)
        raise OSError("No space left on device")

    usage, torch.save = shutil.disk_usage, full
    fit(recipe, inputs, out)


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_a_disk_that_fills_up_in_a_save_is_reported(sharding, inputs, tmp_path):
    said = (
        "rank [01]: .*checkpoint-1: the checkpoint could not be written, 10 bytes are free: make room, "
        "or lower .* from step 0"
    )
    with pytest.raises(ranks.RankFailed, match=said):
        recipe = recipe_for(inputs, sharding, tmp_path / "kept")
        ranks.run(1 if sharding == "none" else 2, half_written, recipe, inputs, tmp_path / "out")
    assert not list(tmp_path.glob("kept/*/*/manifest.json"))


def one_node_cannot_store(recipe, inputs, out):
    logging.basicConfig(filename=out.with_suffix(".log"), force=True)
    saver.PATIENCE = 1.0
    put = Ledger.put

    def refused(self, checkpoint, file, name):
        if os.environ["RANK"] == "1" and checkpoint.step == 1:
            raise StorageError("refused")
        return put(self, checkpoint, file, name)

    Ledger.put = refused
    return fit(recipe, inputs, out, 2)


def test_a_checkpoint_that_one_node_cannot_store_is_none_and_training_continues(inputs, tmp_path):
    recipe = recipe_for(inputs, "ddp", tmp_path / "kept")
    result = ranks.run(2, one_node_cannot_store, recipe, inputs, tmp_path / "out")
    assert [step.step for step in result.steps] == [1, 2, 3, 4]
    said = (
        "stored; the last complete one is of step 0: rank 0: 1-0001-.*: "
        "a node's part was not stored within 1 s; rank 1: refused"
    )
    assert re.search(said, (tmp_path / "out.log").read_text())


def refused(recipe, inputs, out):
    def listing(*arguments, **named):
        raise PermissionError("AccessDenied")

    from fsspec.implementations.local import LocalFileSystem

    LocalFileSystem.ls = listing
    fit(recipe, inputs, out)


def test_a_storage_that_denies_access_is_reported_before_anything_is_loaded(inputs, tmp_path):
    recipe = recipe_for(inputs, "none", tmp_path / "kept", **{"model.name_or_path": str(inputs / "tiny")})
    with pytest.raises(ranks.RankFailed, match="it refuses: check .* AccessDenied; the run does not start"):
        ranks.run(1, refused, recipe, inputs, tmp_path / "out")


def test_without_checkpoints_the_storage_is_never_accessed(inputs, tmp_path):
    changes = {"checkpoints.save_steps": None, "training.max_steps": 1, "training.warmup_steps": 0}
    recipe = recipe_for(inputs, "none", tmp_path / "kept", **changes)
    ranks.run(1, refused, recipe, inputs, tmp_path / "out")


def fit_from_disks_of_their_own(recipe, inputs, out):
    folder = recipe.checkpoints.folder + os.environ["RANK"]
    fit(
        recipe.model_copy(update={"checkpoints": recipe.checkpoints.model_copy(update={"folder": folder})}),
        inputs,
        out,
    )


@pytest.mark.slow
def test_nodes_that_see_other_checkpoints_do_not_train(inputs, tmp_path):
    recipe = recipe_for(inputs, "ddp", tmp_path / "disk", **{"checkpoints.name": "run"})
    fields = {
        "step": 2,
        "attempt": "0001-aaaaaa",
        "decisions": "d",
        "sharding": "ddp",
        "world_size": 2,
        "flytune": "0",
    }
    complete = tmp_path / "disk0" / "run" / "2-0001-aaaaaa"
    complete.mkdir(parents=True)
    Checkpoint(**fields).sealed().write(complete / "manifest.json")
    with pytest.raises(
        ranks.RankFailed, match="one folder that all nodes see.* is 2-0001-aaaaaa on rank 0, None on rank 1"
    ):
        ranks.run(2, fit_from_disks_of_their_own, recipe, inputs, tmp_path / "trained")


def test_a_run_that_died_after_its_last_step_is_only_exported(inputs, tmp_path):
    recipe = recipe_for(inputs, "ddp", tmp_path / "kept", **{"checkpoints.save_steps": 2})
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(2, fit_and_die_in_the_export, recipe, inputs, tmp_path / "killed")
    resumed = ranks.run(2, fit, recipe, inputs, tmp_path / "resumed")
    calm = recipe_for(inputs, "ddp", tmp_path / "none", **{"checkpoints.save_steps": None})
    assert (resumed.resumed_from_step, [step.step for step in resumed.steps]) == (4, [1, 2, 3, 4])
    assert resumed.heldout_loss == ranks.run(2, fit, calm, inputs, tmp_path / "calm").heldout_loss
    assert len((tmp_path / "resumed" / "steps.jsonl").read_text().splitlines()) == 4


def offline(recipe, inputs, out, die_at=None):
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    os.chdir(out.parent)
    fit(recipe, inputs, out, 1, die_at)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_tracker_resumes_the_same_run(inputs, tmp_path):
    pytest.importorskip("wandb")
    recipe = recipe_for(inputs, "none", tmp_path / "kept", tracking={"report_to": ["wandb"]})
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(1, offline, recipe, inputs, tmp_path / "killed", 3)
    ranks.run(1, offline, recipe, inputs, tmp_path / "resumed")
    runs = [path.name.rpartition("-")[2] for path in tmp_path.glob("wandb/offline-run-*")]
    assert len(runs) == 2
    assert len(set(runs)) == 1
