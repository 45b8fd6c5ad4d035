"""Files and folders that appear under their names only when they are complete."""

import threading

import pytest

from flytune.files import create_durably, move_durably, sha256_of, write_durably, written_atomically


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_interrupted_folder_leaves_nothing(tmp_path):
    def interrupted():
        with written_atomically(tmp_path / "model") as folder:
            folder.mkdir()
            (folder / "config.json").write_text("{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == []


def test_an_interrupted_file_leaves_the_old_one(tmp_path):
    (tmp_path / "a").write_text("old")

    def interrupted():
        with written_atomically(tmp_path / "a") as temporary:
            temporary.write_text("ne")
            assert (tmp_path / "a").read_text() == "old"
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        interrupted()
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"
    with written_atomically(tmp_path / "a") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "a").read_text() == "new"


def test_a_folder_of_another_process_is_an_error_or_is_kept(tmp_path):
    def write(**options):
        with written_atomically(tmp_path / "model", **options) as folder:
            folder.mkdir()
            (folder / "mine").touch()
            (tmp_path / "model").mkdir()
            (tmp_path / "model" / "theirs").touch()

    with pytest.raises(OSError, match="not empty"):
        write()
    (tmp_path / "model" / "theirs").unlink()
    (tmp_path / "model").rmdir()
    write(keep_existing=True)
    assert names(tmp_path) == ["model"]
    assert names(tmp_path / "model") == ["theirs"]


def test_one_of_several_writers_creates_a_file(tmp_path):
    start, found = threading.Barrier(8), []

    def create(number):
        start.wait()
        if create_durably(tmp_path / "new" / "a", str(number).encode()):
            found.append(str(number))

    writers = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert found == [(tmp_path / "new" / "a").read_text()]
    assert names(tmp_path / "new") == ["a"]


def test_files_are_written_and_moved_into_new_folders(tmp_path):
    write_durably(tmp_path / "one" / "a", b"content")
    expected = sha256_of(tmp_path / "one" / "a")
    assert move_durably(tmp_path / "one" / "a", tmp_path / "two" / "a") == expected == sha256_of(tmp_path / "two" / "a")
    assert names(tmp_path / "one") == []
