"""Any address: what is missing is an answer, every other failure becomes the caller's error, once."""

import errno

import pytest

from flytune import files
from flytune.addresses import reason
from flytune.errors import DataError, StorageError
from flytune.storage import Storage


@pytest.fixture(params=["folder", "memory", "s3"])
def address(request, tmp_path):
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    return str(tmp_path / "new") if request.param == "folder" else f"memory://{tmp_path.name}"


def test_files_are_written_listed_read_and_deleted(address, tmp_path):
    storage = Storage(address, retry=False)
    assert (storage.names(), storage.exists("a"), storage.names("deep")) == ([], False, [])
    storage.write("a", b"one")
    storage.write("a", b"two")
    (tmp_path / "file").write_bytes(b"three")
    storage.copy(tmp_path / "file", "deep/b")
    assert (tmp_path / "file").exists()
    assert storage.names() == ["a", "deep"]
    assert storage.sizes("") == {"a": 3, "deep/b": 5}
    assert storage.read_each(["a", "deep/b"]) == {"a": b"two", "deep/b": b"three"}
    assert isinstance(storage.read_each(["a", "c"])["c"], FileNotFoundError)
    if storage.is_local:
        assert "5 bytes, more than the 3 that are read" in str(
            storage.read_each(["deep/b"], largest=3)["deep/b"]
        )
    storage.download("deep/b", tmp_path / "got" / "b")
    assert (tmp_path / "got" / "b").read_bytes() == b"three"
    assert storage.get("deep/b") == storage.get("deep/b", tmp_path / "again")
    assert storage.exists("deep/b")
    for name in ("a", "deep", "none"):
        storage.remove(name)
    assert storage.names() == []
    with pytest.raises(FileNotFoundError):
        storage.read("a")


def test_every_failure_is_the_callers_error(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(errno.EACCES, "denied by https://host/key?token=secret now")

    storage = Storage(tmp_path, "data.path", error=DataError, retry=False)
    monkeypatch.setattr(files, "read_regular", fail)
    monkeypatch.setattr(storage.filesystem, "find", fail)
    with pytest.raises(DataError) as caught:
        storage.read("a.jsonl")
    assert str(caught.value) == (
        f"data.path: {tmp_path}: a.jsonl cannot be read: PermissionError: [Errno 13] denied by "
        "https://host/key?... now; it refuses: check the credentials, and that they may read, write, list "
        "and delete there"
    )
    reached = Storage(tmp_path, "data.path", error=DataError, failed="cannot be reached", retry=False)
    with pytest.raises(DataError, match=f"data.path: {tmp_path}: cannot be reached: PermissionError"):
        reached.files()
    with pytest.raises(
        DataError, match="^nosuch://x: cannot be opened: ValueError: Protocol not known: nosuch"
    ):
        Storage("nosuch://x", key="", error=DataError)


def test_reasons_are_one_line():
    assert reason(OSError("a\n  b")) == "OSError: a b"


def test_copies_between_all_kinds_of_storage(bucket, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.safetensors").write_bytes(bytes(range(256)) * 64)
    here, there, other = Storage(tmp_path / "here"), Storage(f"{bucket}/there"), Storage(f"{bucket}/other")
    folder = Storage(tmp_path / "folder")
    names = {"deep/b.safetensors": "a.safetensors"}
    there.copy_from(here, {"a.safetensors": "a.safetensors"})  # uploaded
    other.copy_from(there, names)  # by the store
    folder.copy_from(other, {"c.safetensors": "deep/b.safetensors"})  # downloaded
    folder.copy_from(here, names)  # linked
    digest = here.get("a.safetensors")
    assert [
        other.get("deep/b.safetensors"),
        folder.get("c.safetensors"),
        folder.get("deep/b.safetensors"),
    ] == [digest] * 3
    assert (tmp_path / "folder/deep/b.safetensors").samefile(tmp_path / "here/a.safetensors")


def test_a_copy_that_is_not_complete_yet_is_awaited(bucket, monkeypatch):
    """As on Azure, which answers before it has copied."""
    there, other = Storage(f"{bucket}/there"), Storage(f"{bucket}/other")
    there.write("a", b"new")
    other.write("a", b"old")
    waited = []
    monkeypatch.setattr(
        "flytune.storage.time.sleep", lambda seconds: waited.append(seconds) or other.write("a", b"new")
    )
    monkeypatch.setattr(other.filesystem, "copy", lambda *arguments, **named: None)
    other.copy_from(there, {"a": "a"})
    assert waited == [1]
    other.write("a", b"old")
    monkeypatch.setattr("flytune.storage.time.sleep", lambda seconds: None)
    with pytest.raises(
        StorageError, match=r"s3://models/other/a: the copy of s3://models/there/a is incomplete; run again"
    ):
        other.copy_from(there, {"a": "a"})


def test_a_file_of_a_store_is_read_up_to_its_limit(bucket):
    storage = Storage(bucket, "data.path", retry=False)
    storage.write("large.json", b"x" * 1000)
    assert storage.read("large.json", largest=1000) == b"x" * 1000
    with pytest.raises(StorageError, match="large.json: more than the 999 bytes that are read"):
        storage.read("large.json", largest=999)
