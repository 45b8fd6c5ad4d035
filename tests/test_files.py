"""Reading of regular files, and files and folders that appear under their names only when they are
complete."""

import threading

import pytest

from flytune.files import (
    FileRefusedError,
    create_durably,
    move_durably,
    open_regular,
    read_regular,
    sha256_of,
    write_durably,
    written_atomically,
)
from tests.support import special_files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


SAID = {
    "a named pipe": "a named pipe, which is not read; name a regular file",
    "an endless device": "a device, which is not read; name a regular file",
    "a sparse file": "3,000,000,000 bytes, more than the 1,000 that are read",
    "a socket": "a socket, which is not read; name a regular file",
    "a folder": "a folder; name a file",
}


@pytest.mark.parametrize("kind", SAID)
def test_what_is_no_regular_file_or_too_large_is_refused_without_being_opened(kind, tmp_path):
    path = special_files.made(kind, tmp_path / "x")
    with pytest.raises(FileRefusedError) as error:
        read_regular(path, 1000)
    assert str(error.value) == SAID[kind]
    if kind != "a sparse file":
        with pytest.raises(FileRefusedError):
            open_regular(path)


def test_a_file_of_the_kernel_is_empty():
    with open_regular("/proc/kmsg") as file:
        assert file.read() == b""
    assert read_regular("/proc/self/environ", 1000) == b""


def test_a_file_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("x")
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(FileRefusedError, match="5 bytes, more than the 4 that are read"):
        read_regular(tmp_path / "x", 4)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "y", 4)


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
    assert (
        move_durably(tmp_path / "one" / "a", tmp_path / "two" / "a")
        == expected
        == sha256_of(tmp_path / "two" / "a")
    )
    assert names(tmp_path / "one") == []
