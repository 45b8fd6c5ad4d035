"""One check of names from outside, and each road on which a name arrives: a file outside of the folder
survives."""

import json
import logging

import pytest

from flytune import names
from flytune.data import shards
from flytune.errors import DataError, ExportError, StorageError, TrainingError
from flytune.models import remote, weight_index
from flytune.models.safetensors_files import TensorFiles
from flytune.records import Contents, Shard, StoredFile
from flytune.records.contents import verify
from flytune.schema import RecordError
from flytune.storage import Storage
from flytune.training.checkpoints.ledger import Checkpoint, Ledger, NodeFiles

SHA = "0" * 64
BAD = {
    "absolute": "/etc/passwd",
    "parent": "../outside.txt",
    "parent inside": "a/../../outside.txt",
    "parent at the end": "a/..",
    "parent with a space": "a/.. /b",
    "here": "./a",
    "nothing": "",
    "an empty part": "a//b",
    "a slash at the end": "a/",
    "a drive": "C:\\Windows\\x",
    "a drive without a backslash": "C:x",
    "a backslash": "..\\outside.txt",
    "home": "~/x",
    "null": "a\x00b",
    "line end": "a\nb",
    "escape": "a\x1b[2J",
    "C1": "a\x9bb",
    "right to left": "a\u202egpj.exe",
    "line separator": "a\u2028b",
    "a surrogate": "a\ud800",
    "a protocol": "s3://bucket/x",
    "a chained protocol": "file::a",
    "a long part": "a" * 256,
    "a long name": "/".join(["abcdefgh"] * 200),
    "a long part in bytes": "é" * 200,
}
GOOD = [
    "a",
    "model-00001-of-00002.safetensors",
    "train/00000.parquet",
    ".gitattributes",
    "a b/c d.txt",
    "é.json",
    "..a",
    "a..b",
    "...",
]


@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
def test_a_name_that_is_no_file_below_the_folder_is_refused(name):
    assert names.problem(name)
    with pytest.raises(names.NameRefused) as error:
        names.check(name)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("name", GOOD)
def test_other_names_are_used(name):
    assert names.check(name) == name


def test_what_is_no_text_is_no_name():
    assert all(names.problem(name) for name in (None, 3, ["a"], {"a": 1}, True))


def test_names_of_one_folder_do_not_collide():
    assert names.check_list(["a/b", "a/c", "b"]) == ["a/b", "a/c", "b"]
    with pytest.raises(names.NameRefused, match="'a' is there twice"):
        names.check_list(["a", "b", "a"])
    with pytest.raises(names.NameRefused, match="'a' is a file and the folder of 'a/b/c'"):
        names.check_list(["a/b/c", "a"])


def test_a_link_that_leads_out_is_refused_and_that_of_a_hub_cache_is_not(tmp_path):
    outside, folder = tmp_path / "outside.txt", tmp_path / "folder"
    folder.mkdir()
    outside.write_text("keep")
    (folder / "file").symlink_to(outside)
    (folder / "sub").symlink_to(tmp_path)
    (folder / "own").write_text("x")
    (folder / "near").symlink_to("own")
    for name in ("file", "sub/outside.txt"):
        with pytest.raises(names.NameRefused, match="a link that leads out of folder"):
            names.inside(folder, name)
    assert names.inside(folder, "near") == folder / "near"
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "c0ffee").mkdir(parents=True)
    (cache / "blobs" / "x").write_text("x")
    (cache / "snapshots" / "c0ffee" / "config.json").symlink_to("../../blobs/x")
    assert names.inside(cache / "snapshots" / "c0ffee", "config.json").read_text() == "x"


RECORDS = {
    "artifact.json": lambda name: Contents.parse(
        json.dumps({"files": [{"file": name, "size": 1, "sha256": SHA}]})
    ),
    "a checkpoint's part": lambda name: NodeFiles.parse(
        json.dumps({"files": [{"file": name, "size": 1, "sha256": SHA}]})
    ),
    "a checkpoint's manifest": lambda name: Checkpoint.parse(
        json.dumps(CHECKPOINT | {"files": [{"file": name, "size": 1, "sha256": SHA}]})
    ),
    "a shard": lambda name: Shard.parse(json.dumps({"file": name, "samples": 1, "tokens": 1, "sha256": SHA})),
}
CHECKPOINT = {
    "step": 2,
    "attempt": "0001-abcdef",
    "decisions": "d",
    "sharding": "none",
    "world_size": 1,
    "flytune": "0.2.0",
}


@pytest.mark.parametrize("read", RECORDS.values(), ids=RECORDS)
@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
def test_no_record_has_such_a_name(read, name):
    with pytest.raises(RecordError):
        read(name)


@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
def test_no_index_of_weights_has_such_a_name(name, tmp_path):
    index = json.dumps({"weight_map": {"a": name}})
    with pytest.raises(weight_index.IndexRefused):
        weight_index.weight_map(index)
    from flytune.errors import RecipeError

    with pytest.raises(RecipeError, match="model.safetensors.index.json: "):
        remote.files_to_fetch(["a.safetensors"], index.encode(), False, "model.name_or_path: x")
    (tmp_path / weight_index.INDEX).write_text(index)
    with pytest.raises(TrainingError, match=r"index\.json: "):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "<html>"])
def test_an_index_that_is_none_is_refused(text):
    with pytest.raises(weight_index.IndexRefused):
        weight_index.weight_map(text)


def storages(tmp_path):
    outside = tmp_path / "outside.txt"
    outside.write_text("keep")
    return outside, [str(tmp_path / "store"), f"file://{tmp_path}/store", "memory://readers/store"]


@pytest.mark.parametrize(
    "name", ["../outside.txt", "a/../../outside.txt", "/outside.txt", "a\\..\\outside.txt", "a\x00"]
)
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_no_storage_reads_writes_or_deletes_outside_of_its_address(tmp_path, name, kind):
    import fsspec

    fsspec.filesystem("memory").pipe_file("/readers/outside.txt", b"keep")
    outside, addresses = storages(tmp_path)
    storage = Storage(addresses[kind], "", retry=False)
    storage.write("a/b", b"x")
    (tmp_path / "mine").write_text("x")
    for use in (
        lambda: storage.read(name),
        lambda: storage.write(name, b"evil"),
        lambda: storage.create(name, b"evil"),
        lambda: storage.put(tmp_path / "mine", name),
        lambda: storage.copy(tmp_path / "mine", name),
        lambda: storage.copy_from(storage, {name: "a/b"}),
        lambda: storage.get(name),
        lambda: storage.remove(name),
    ):
        with pytest.raises(StorageError, match="it is not used"):
            use()
    assert outside.read_text() == "keep"
    assert fsspec.filesystem("memory").cat("/readers/outside.txt") == b"keep"


def test_a_folder_that_is_a_link_is_not_written_through_nor_emptied(tmp_path):
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "keep.txt").write_text("keep")
    (tmp_path / "mine").write_text("x")
    storage = Storage(tmp_path / "store", "")
    storage.write("a", b"x")
    (tmp_path / "store" / "link").symlink_to(outside)
    for use in (
        lambda: storage.write("link/new", b"evil"),
        lambda: storage.create("link/new", b"evil"),
        lambda: storage.put(tmp_path / "mine", "link/new"),
        lambda: storage.copy(tmp_path / "mine", "link/new"),
        lambda: storage.remove("link/keep.txt"),
    ):
        with pytest.raises(StorageError, match="a symbolic link leads out of this folder"):
            use()
    storage.remove("link")
    assert [path.name for path in outside.iterdir()] == ["keep.txt"]
    assert not (tmp_path / "store" / "link").is_symlink()


def test_a_listing_leaves_out_names_that_nobody_can_use(tmp_path, caplog):
    store = tmp_path / "store"
    store.mkdir()
    (store / "fine").write_text("x")
    (store / "back\\slash").write_text("x")
    (store / "line\nend").write_text("x")
    with caplog.at_level(logging.WARNING):
        assert Storage(store, "").names() == ["fine"]
        assert list(Storage(store, "").files()) == ["fine"]
    assert "it is left out" in caplog.text


@pytest.mark.parametrize("address", ["local", "memory://readers/run"])
def test_a_checkpoint_with_a_name_outside_is_no_checkpoint_and_deletes_and_writes_nothing(tmp_path, address):
    import fsspec

    outside = tmp_path / "outside.txt"
    outside.write_text("keep")
    fsspec.filesystem("memory").pipe_file("/readers/outside.txt", b"keep")
    ledger = Ledger(Storage(tmp_path / "run" if address == "local" else address, ""), limit=1)
    ledger.begin()
    content = Checkpoint.model_validate(CHECKPOINT)
    evil = [
        {"file": name, "size": 4, "sha256": SHA}
        for name in ("../../outside.txt", "../outside.txt", str(outside))
    ]
    ledger.storage.write(
        f"{content.folder}/manifest.json", json.dumps(CHECKPOINT | {"files": evil, "digest": SHA}).encode()
    )
    ledger.storage.write(f"{content.folder}/part-0.json", json.dumps({"files": evil}).encode())
    assert ledger.checkpoints() == []
    with pytest.raises(RecordError):
        ledger.parts(content, 1)
    ledger.clear()
    assert outside.read_text() == "keep"
    assert fsspec.filesystem("memory").cat("/readers/outside.txt") == b"keep"


def test_a_checkpoint_whose_file_is_a_link_to_another_is_not_resumed_from(tmp_path):
    outside = tmp_path / "outside.bin"
    outside.write_bytes(b"mine")
    ledger = Ledger(Storage(tmp_path / "run", ""), limit=1)
    ledger.begin()
    content = Checkpoint.model_validate(CHECKPOINT | {"attempt": ledger.attempt})
    stored = StoredFile(file="model.bin", size=4, sha256="a" * 64)
    (tmp_path / "run" / content.folder).mkdir(parents=True)
    (tmp_path / "run" / content.folder / "model.bin").symlink_to(outside)
    made = content.model_copy(update={"files": [stored]}).sealed()
    ledger.storage.write(f"{content.folder}/manifest.json", made.model_dump_json().encode())
    assert "leads out of" in str(ledger.fault(made))
    ledger.link(made, tmp_path / "into")
    assert not (tmp_path / "into" / "model.bin").exists()
    ledger.clear()
    assert outside.read_bytes() == b"mine"


def test_an_artifact_with_a_link_that_leads_out_is_refused(tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    (artifact / "config.json").symlink_to(tmp_path / "secret.json")
    Contents(files=[StoredFile(file="config.json", size=2, sha256=SHA)]).write(artifact / "artifact.json")
    with pytest.raises(ExportError, match="a link that leads out of artifact"):
        verify(artifact)


def test_a_prepared_data_set_with_a_link_that_leads_out_is_refused(tmp_path):
    from tests.support.stages import write_dataset
    from tests.support.tiny import tiny_base

    folder = write_dataset(tmp_path / "dataset", tiny_base(tmp_path))
    file = folder / shards.read_manifest(folder).train.shards[0].file
    file.rename(tmp_path / "moved.parquet")
    file.symlink_to(tmp_path / "moved.parquet")
    with pytest.raises(DataError, match="a link that leads out of dataset"):
        shards.load(folder, "train")
