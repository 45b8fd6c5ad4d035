"""The ledger: no order of events, and no damage, leaves a run without its newest complete checkpoint."""

import errno
import hashlib
import logging
import math
import os
import uuid
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from flytune import storage
from flytune.errors import StorageError, TrainingError
from flytune.recipe import Recipe
from flytune.storage import Storage
from flytune.training.checkpoints import paths, resume
from flytune.training.checkpoints.ledger import Checkpoint, Ledger, kept
from tests.support.tiny import tiny_recipe

ALONE = SimpleNamespace(world_size=1, process_index=0, local_process_index=0)
FILES = ("model.safetensors", "global_step/optim.pt")
few = settings(max_examples=60)


class Killed(BaseException):
    """The process ended here."""


class MortalFileSystem(MemoryFileSystem):
    """A memory file system whose user is killed in the middle of the operation that comes after `left`
    others."""

    protocol = "mortal"
    cachable = False
    store, pseudo_dirs = {}, [""]
    left = None

    def _live(self):
        if MortalFileSystem.left == 0:
            raise Killed
        MortalFileSystem.left = MortalFileSystem.left and MortalFileSystem.left - 1

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("mortal://", "memory://"))

    def pipe_file(self, path, value, **kwargs):
        self._live()
        super().pipe_file(path, value, **kwargs)

    def rm_file(self, path):
        self._live()
        super().rm_file(path)

    def _open(self, path, mode="rb", **kwargs):
        file = super()._open(path, mode, **kwargs)
        if "w" in mode:
            write = file.write

            def written(content):
                # A killed process leaves half of it behind.
                if MortalFileSystem.left == 0:
                    write(content[: len(content) // 2])
                self._live()
                return write(content)

            file.write = written
        return file


fsspec.register_implementation("mortal", MortalFileSystem, clobber=True)


def ledger_at(address, limit=2, keeps_best=True):
    ledger = Ledger(Storage(address), limit, keeps_best)
    ledger.begin()
    return ledger


def checkpoint_of(ledger, step, eval_loss=None):
    fields = {"decisions": "d", "sharding": "ddp", "world_size": 1, "flytune": "0", "eval_loss": eval_loss}
    return Checkpoint(step=step, attempt=ledger.attempt, **fields)


def content(step, name):
    return f"{name} after {step} steps".encode() * 50


def saving(ledger, step, folder, eval_loss=None):
    """Store a checkpoint, and yield after each of its operations."""
    checkpoint, stored = checkpoint_of(ledger, step, eval_loss), []
    for name in FILES:
        file = folder / uuid.uuid4().hex
        file.write_bytes(content(step, name))
        stored.append(ledger.put(checkpoint, file, name))
        yield None
    ledger.put_part(checkpoint, 0, stored)
    yield None
    ledger.commit(checkpoint.model_copy(update={"files": ledger.parts(checkpoint, 1)}))
    yield step


def save(ledger, step, folder, eval_loss=None):
    for _ in saving(ledger, step, folder, eval_loss):
        pass


def newest(ledger, into):
    return resume.newest_complete(ledger, ALONE, into, lambda checkpoint: None)


def newest_step(address, into):
    """Return the step that a new reader resumes from, after a check of the files that it reads."""
    found = newest(Ledger(Storage(address), 2), into)
    if found is None:
        return 0
    checkpoint, folder = found
    for name in FILES:
        assert (folder / name).read_bytes() == content(checkpoint.step, name)
    return checkpoint.step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("staged")


@few
@given(lives=st.lists(st.integers(0, 25), min_size=1, max_size=5))
def test_killed_anywhere_the_newest_complete_checkpoint_is_found(lives, folder):
    address, done = f"mortal://{uuid.uuid4()}", 0
    for left in lives:
        committed = done
        try:
            MortalFileSystem.left = left
            ledger = ledger_at(address)
            for step in count(done + 1):
                save(ledger, step, folder)
                committed = step
        except Killed:
            MortalFileSystem.left = None
        done = newest_step(address, folder / "read")
        # A kill after the manifest leaves the checkpoint complete.
        assert done in (committed, committed + 1)
    MortalFileSystem.left = None
    last = ledger_at(address)
    save(last, done + 1, folder)
    save(last, done + 2, folder)
    assert {name.partition("-")[0] for name in last.storage.names()} == {str(done + 1), str(done + 2)}, (
        "nothing else is left"
    )


@few
@given(turns=st.lists(st.booleans(), max_size=60), ahead=st.integers(0, 3))
def test_two_attempts_at_once_do_not_harm_each_other(turns, ahead, folder):
    address = f"memory://{uuid.uuid4()}"
    old, new = ledger_at(address), None
    old.storage.write(f"9-{old.attempt}/left", b"by one that was killed")
    new = ledger_at(address)
    assert int(new.attempt[:4]) == int(old.attempt[:4]) + 1
    running = {
        is_old: (done for step in count(1 + ahead * is_old) for done in saving(ledger, step, folder))
        for is_old, ledger in ((True, old), (False, new))
    }
    most = 0
    for turn in turns:
        most = max(most, next(running[turn]) or 0)
        assert newest_step(address, folder / "read") == most
    new.clear()
    assert old.storage.names() == []


@few
@given(
    steps=st.lists(st.tuples(st.integers(1, 20), st.none() | st.floats(0, 9)), min_size=1, max_size=12),
    limit=st.integers(1, 4),
)
def test_the_newest_and_the_best_are_kept(steps, limit):
    ledger = ledger_at(f"memory://{uuid.uuid4()}")
    checkpoints = [
        checkpoint_of(ledger, step, loss)
        for step, loss in {step: (step, loss) for step, loss in steps}.values()
    ]
    found = [checkpoint.step for checkpoint in kept(checkpoints, limit, keeps_best=True)]
    assert [checkpoint.step for checkpoint in kept(checkpoints, limit, keeps_best=False)] == found[:limit]
    by_step = sorted((checkpoint.step for checkpoint in checkpoints), reverse=True)
    assert found[:limit] == by_step[:limit]
    losses = {
        checkpoint.step: checkpoint.eval_loss
        for checkpoint in checkpoints
        if checkpoint.eval_loss is not None
    }
    assert not losses or min(losses.values()) in [losses.get(step) for step in found]
    assert len(found) <= limit + 1


def test_the_end_of_a_run_deletes_what_a_lost_attempt_stores_that_began_with_nothing_stored_too(
    tmp_path, monkeypatch
):
    lost = ledger_at(str(tmp_path / "run"))
    monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "1")
    new = ledger_at(str(tmp_path / "run"))
    save(lost, 2, tmp_path)
    save(new, 4, tmp_path)
    new.clear()
    assert new.storage.names() == []


def test_a_folder_keeps_the_newest_and_the_best_and_files_are_moved_there(tmp_path):
    ledger = ledger_at(str(tmp_path / "run"))
    for step, loss in enumerate((3.0, 1.0, 2.0, 2.5, 2.25), 1):
        save(ledger, step, tmp_path, loss)
    assert [checkpoint.step for checkpoint in ledger.checkpoints()] == [5, 4, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    checkpoint, where = newest(ledger, tmp_path / "mine")
    assert where == tmp_path / "mine" / f"5-{ledger.attempt}"
    stored = checkpoint.files[0].file
    assert (where / stored).samefile(tmp_path / "run" / f"5-{ledger.attempt}" / stored), "not copied"
    assert checkpoint.files[0].sha256 == hashlib.sha256(content(5, FILES[0])).hexdigest()
    ledger.clear()
    assert list((tmp_path / "run").iterdir()) == []


def lowest(ledger, into, step, loss, decisions="d"):
    like = checkpoint_of(ledger, step).model_copy(update={"decisions": decisions})
    found = resume.lowest_loss(ledger, ALONE, into, like, loss)
    return found and (found[0].step, (found[1] / FILES[0]).read_bytes() == content(found[0].step, FILES[0]))


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_the_checkpoint_of_the_lowest_loss_is_read_unless_the_live_model_is_better(place, tmp_path, caplog):
    address = str(tmp_path / "run") if place == "folder" else f"memory://{uuid.uuid4()}"
    ledger = ledger_at(address, limit=9)
    for step, loss in enumerate((3.0, 1.0, 2.0, None, math.nan, 2.0, 0.5), 1):
        save(ledger, step, tmp_path, loss)
    into = tmp_path / "best"
    assert lowest(ledger, into, 6, 2.0) == (2, True), "step 7 is another attempt's"
    assert lowest(ledger, into, 6, None) == (2, True)
    assert lowest(ledger, into, 6, 1.0) is None, "of equal losses, the last"
    assert lowest(ledger, into, 2, 1.0) is None
    assert lowest(ledger, into, 6, 2.0, "other data") is None
    ledger.storage.write(f"2-{ledger.attempt}/{FILES[0]}", b"damaged")
    assert lowest(ledger, into, 5, 2.5) == (3, True)
    assert "has the lowest eval_loss and is not complete" in caplog.text
    assert lowest(ledger, into, 6, 1.5) is None


def test_only_the_newest_are_kept_where_the_last_weights_are_exported(tmp_path):
    ledger = ledger_at(str(tmp_path / "run"), keeps_best=False)
    for step, loss in enumerate((1.0, 2.0, 3.0), 1):
        save(ledger, step, tmp_path, loss)
    assert [checkpoint.step for checkpoint in ledger.checkpoints()] == [3, 2]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_checkpoint_in_use_is_kept_though_another_attempt_deletes_it(has_links, tmp_path, monkeypatch):
    def refuses(self, other):
        raise OSError(errno.EOPNOTSUPP, "no links here")

    if not has_links:
        monkeypatch.setattr(Path, "hardlink_to", refuses)
    earlier = ledger_at(str(tmp_path / "run"))
    save(earlier, 1, tmp_path)
    _, where = newest(ledger_at(str(tmp_path / "run")), tmp_path / "mine")
    for step in (2, 3, 4):
        save(earlier, step, tmp_path)
    assert not (tmp_path / "run" / where.name).exists()
    assert [(where / name).read_bytes() for name in FILES] == [content(1, name) for name in FILES]


def test_a_checkpoint_whose_step_the_trainer_did_not_read_ends_the_run():
    with pytest.raises(
        TrainingError, match="rank 0: the checkpoint is of step 7, and training would resume from 0"
    ):
        resume.check_resumed(7, 0, ALONE)


DAMAGE = {
    "missing": (lambda path: path.unlink(), "optim.pt is missing"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "optim.pt has 1749 bytes of 1750"),
    "flipped": (
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\0"),
        "optim.pt: its content is not what was written",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_reported(damage, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(resume, "PAUSE", 0)
    ledger = ledger_at(str(tmp_path / "run"))
    for step in (10, 11):
        save(ledger, step, tmp_path)
    change, damage_message = DAMAGE[damage]
    change(tmp_path / "run" / f"11-{ledger.attempt}" / FILES[1])
    with caplog.at_level(logging.WARNING):
        assert newest_step(str(tmp_path / "run"), tmp_path) == 10
    assert f"is not complete: global_step/{damage_message}" in caplog.text
    change(tmp_path / "run" / f"10-{ledger.attempt}" / FILES[1])
    with caplog.at_level(logging.WARNING):
        assert newest_step(str(tmp_path / "run"), tmp_path) == 0
    assert "no checkpoint is complete; the run starts from the beginning" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: '{"step": 2',
        lambda text: text.replace('"world_size": 1', '"world_size": 3'),
        lambda text: "",
    ],
)
def test_a_damaged_manifest_is_skipped_and_reported(damage, tmp_path, caplog):
    ledger = ledger_at(str(tmp_path / "run"))
    for step in (1, 2):
        save(ledger, step, tmp_path)
    manifest = tmp_path / "run" / f"2-{ledger.attempt}" / "manifest.json"
    manifest.write_text(damage(manifest.read_text()))
    with caplog.at_level(logging.WARNING):
        assert newest_step(str(tmp_path / "run"), tmp_path) == 1
    assert "manifest.json is damaged" in caplog.text


def test_a_checkpoint_that_the_run_cannot_resume_from_is_refused(caplog):
    written = checkpoint_of(Ledger(Storage(f"memory://{uuid.uuid4()}"), 2), 7)

    def check(resizes=True, settings=None, **changes):
        of_both = {"settings": settings[0]} if settings else {}
        own = written.model_copy(update={"settings": settings[1] if settings else {}} | changes)
        resume.check(written.model_copy(update=of_both | {"base": "b1"}), own, resizes)

    with pytest.raises(
        TrainingError, match="step 7: written under sharding ddp, and this run has fsdp, which"
    ):
        check(sharding="fsdp")
    with pytest.raises(
        TrainingError, match="step 7: written by 1 process, and this run has 2; DeepSpeed .* a shape of 1"
    ):
        check(resizes=False, world_size=2)
    name = "model.name_or_path"
    with pytest.raises(
        TrainingError,
        match=r"another base model: \"/b\" has the same name, and the content .* \(b1, now b2\)",
    ):
        check(base="b2", settings=({name: '"/b"'}, {name: '"/b"'}))
    with pytest.raises(
        TrainingError, match='another base model: model.name_or_path: "o/a", now "o/b"; .* Restore the base'
    ):
        check(base="", settings=({name: '"o/a"'}, {name: '"o/b"'}))
    batch, rate = "training.global_batch_size", "training.learning_rate"
    with pytest.raises(
        TrainingError,
        match=rf"cannot change: {batch}: 8, now 4 \(the position in the data .*Write the earlier",
    ):
        check(settings=({batch: "8", rate: "1"}, {batch: "4", rate: "2"}))
    with caplog.at_level(logging.WARNING):
        check(base="b1", decisions="d", settings=({name: '"/a"'}, {name: '"/b"'}))
        assert "written with" not in caplog.text, "the same base at another path"
        check(decisions="e-1", settings=({rate: "0.1"}, {rate: "0.2", "publish.address": '"hf://a/b"'}))
    assert (
        'step 7: written with publish.address: its default, now "hf://a/b"; training.learning_rate: 0.1, now '
        "0.2" in caplog.text
    )
    assert "this run's hold from step 8 on" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check(decisions="e-1", settings=({}, {"data.heldout_fraction": "0"}))
    assert "may have been trained" not in caplog.text, "nothing is held out"
    with caplog.at_level(logging.WARNING):
        check(decisions="e-1", settings=({rate: "0.1"}, {rate: "0.2"}))
    assert "not before it, and whose held-out samples may have been trained in the steps" in caplog.text
    with caplog.at_level(logging.WARNING):
        check(decisions="other")
    assert "written with another recipe or other data" in caplog.text
    assert "written by flytune 0, this is" in caplog.text


class FailingFileSystem(MemoryFileSystem):
    """A memory file system that raises each of `errors` once, then works."""

    protocol = "failing"
    cachable = False
    store, pseudo_dirs = {}, [""]
    errors: ClassVar = []

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("failing://", "memory://"))

    def pipe_file(self, path, value, **kwargs):
        if FailingFileSystem.errors:
            raise FailingFileSystem.errors.pop(0)
        super().pipe_file(path, value, **kwargs)


fsspec.register_implementation("failing", FailingFileSystem, clobber=True)


@pytest.mark.parametrize(
    "error", [ConnectionError("reset"), TimeoutError("slow"), PermissionError("ExpiredToken: it expired")]
)
def test_a_storage_that_is_unavailable_for_a_while_is_tried_again(error, monkeypatch, caplog):
    monkeypatch.setattr(storage, "WAITS", (0,) * 8)
    FailingFileSystem.errors = [error] * 5
    place = Storage(f"failing://{uuid.uuid4()}")
    with caplog.at_level(logging.WARNING):
        place.write("a", b"1")
    assert place.read("a") == b"1"
    assert caplog.text.count("trying again in 0 s") == 5


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EIO, "gone"), "it did not come back within two minutes: OSError"),
        (
            OSError(errno.ENOSPC, "no space"),
            "it is full: make room, or lower checkpoints.save_total_limit: OSError",
        ),
        (
            OSError(errno.EIO, "An error occurred (QuotaExceeded)"),
            "it is full: make room, .*: OSError: .*QuotaExceeded",
        ),
        (
            PermissionError("AccessDenied"),
            "it refuses: check the credentials, .*: PermissionError: AccessDenied",
        ),
        (FileNotFoundError("NoSuchBucket"), "there is no such place: NoSuchBucket"),
    ],
)
def test_a_storage_that_fails_is_reported(error, said, monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0,) * 8)
    FailingFileSystem.errors = [error] * 20
    with pytest.raises(StorageError, match=f"checkpoints.folder: failing://.*/a: {said}"):
        Storage(f"failing://{uuid.uuid4()}").write("a", b"1")


def test_an_address_of_an_unknown_protocol_is_reported():
    expected = "checkpoints.folder: nothing://a: cannot be opened: ValueError: Protocol not known: nothing"
    with pytest.raises(StorageError, match=expected):
        Storage("nothing://a")


def test_our_own_errors_are_not_attributed_to_the_storage():
    assert storage.failure(TypeError("a bug")) is None


def test_folders_of_attempts_that_have_ended_are_removed_and_no_others(tmp_path):
    mine = paths.open_folder(tmp_path / "run", "0002-aaaaaa", 0, is_first=True)
    dead = tmp_path / "run" / "attempt-0001-bbbbbb" / "node-0"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    child = os.fork()
    if not child:  # its hold on the lock ends with it
        paths.open_folder(tmp_path / "run", "0001-cccccc", 0, is_first=True)
        os._exit(0)
    os.waitpid(child, 0)
    paths.sweep(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["attempt-0002-aaaaaa"]
    paths.close_folder(mine)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_removal_was_interrupted_is_removed_by_the_next_sweep(tmp_path, monkeypatch):
    dead = tmp_path / "run" / "attempt-0001-bbbbbb" / "node-0"
    (dead / "checkpoint-1").mkdir(parents=True)
    (dead / "lock").touch()
    with monkeypatch.context() as context, pytest.raises(Killed):
        context.setattr(paths.shutil, "rmtree", killed)
        paths.sweep(tmp_path / "run")
    assert (dead / "lock").exists()
    paths.sweep(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_files_written_into_a_folder_during_its_removal_are_removed_by_the_next_sweep(tmp_path):
    late = tmp_path / "run" / "attempt-0001-bbbbbb" / "node-0" / "checkpoint-3"
    late.mkdir(parents=True)
    paths.sweep(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_clearing_removes_what_attempts_left_that_were_killed_after_the_last_sweep(tmp_path):
    changes = {"checkpoints": {"folder": str(tmp_path / "runs"), "name": "one", "save_steps": 1}}
    recipe = Recipe.model_validate(tiny_recipe(tmp_path / "base", tmp_path / "x.jsonl") | changes)
    dead = tmp_path / "runs" / "one" / "attempt-0001-bbbbbb" / "node-0" / "checkpoint-3"
    dead.mkdir(parents=True)
    (dead.parent / "lock").touch()
    # What attempts leave that are killed while they write their record and a note for the next one.
    for unfinished in (
        ".record-0005-b60f3b3e.json.f69200ca",
        ".notes.json.0123abcd",
        ".phase-a-0-0.json.0123abcd",
    ):
        (tmp_path / "runs" / "one" / unfinished).touch()
    result = SimpleNamespace(attempt="0002-aaaaaa", stopped_early=None)
    paths.clear(recipe, SimpleNamespace(content_sha256="0" * 64), result)
    assert list((tmp_path / "runs").iterdir()) == []


def killed(*arguments, **named):
    raise Killed


@pytest.mark.parametrize("gone", ["attempt-0001-aaaaaa", "attempt-0001-aaaaaa/node-0", "."])
def test_a_folder_that_another_process_removes_during_a_sweep_is_passed_over(gone, tmp_path, monkeypatch):
    home, list_folder = tmp_path / "run", os.scandir
    for attempt in ("0001-aaaaaa", "0002-bbbbbb"):
        (home / f"attempt-{attempt}" / "node-0" / "checkpoint").mkdir(parents=True)

    def listed(path="."):
        if not isinstance(path, int) and Path(path) == home / gone and (home / gone).exists():
            paths.shutil.rmtree(path)
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", listed)
    paths.sweep(home)
    monkeypatch.undo()
    assert not home.exists()


def test_a_folder_that_a_sweep_removes_as_it_is_made_is_made_again(tmp_path, monkeypatch):
    lock, home = paths.fcntl.flock, tmp_path / "run"
    sweeps = iter([True])

    def swept(descriptor, how):
        if how == paths.fcntl.LOCK_SH and next(sweeps, False):
            paths.remove(home / "attempt-0001-aaaaaa" / "node-0")
        lock(descriptor, how)

    monkeypatch.setattr(paths.fcntl, "flock", swept)
    mine = paths.open_folder(home, "0001-aaaaaa", 0, is_first=True)
    paths.sweep(home)
    assert (mine / "lock").exists()
    paths.close_folder(mine)
