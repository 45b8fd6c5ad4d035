"""Hashes of files, and files and folders that appear under their names only when they are complete."""

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHUNK = 8 * 2**20
"""Bytes of a file in memory at a time; s3fs and gcsfs collect up to 100 MB of them for a part of an upload."""


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content as 64 hex digits."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def copy_stream(source: Any, target: Any) -> str:
    """Copy a stream to `target`, if there is one, and return its SHA-256."""
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


@contextmanager
def written_atomically(path: Path, *, keep_existing: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path` for a new file or folder, which is renamed to `path` if the block succeeds.

    If the block fails, the file or folder is deleted. A reader of `path` sees the old content or the new content.

    Args:
        path: a file, which is replaced if it exists, or a folder. The parent folder is created.
        keep_existing: whether a folder that another process has written to `path` meanwhile is kept, and this one deleted.

    Raises:
        OSError: `path` is a folder that is not empty, and `keep_existing` is not set.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        yield temporary
        if keep_existing and temporary.is_dir() and path.is_dir():
            return
        os.replace(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def link_or_copy(file: Path, path: Path) -> None:
    """Hard-link a large file that nobody edits; copy it to another file system."""
    try:
        os.link(file.resolve(), path)
    except OSError:
        shutil.copy(file, path)


@contextmanager
def created_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path` for a new file, which gets the name `path` if the block succeeds.

    A file that is there already stays as it is, because readers of a file that is replaced fail on network file systems.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        yield temporary
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            if not path.exists():
                os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file atomically; once this returns, it survives a crash of the machine."""
    with written_atomically(path) as temporary:
        _write_and_sync(temporary, content)
    sync(path.parent)


def create_durably(path: Path, content: bytes) -> bool:
    """Write a file that does not exist yet, atomically and durably; return False if it exists.

    Of several processes that create the same file at once, exactly one gets True, on network file systems as well.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        _write_and_sync(temporary, content)
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
    return True


def move_durably(file: Path, path: Path) -> str:
    """Move a file to `path` and return its SHA-256; once this returns, it survives a crash of the machine."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        os.fsync(content.fileno())
    path.parent.mkdir(parents=True, exist_ok=True)
    # A rename within one file system, a copy to another one.
    shutil.move(file, path)
    sync(path)
    sync(path.parent)
    return digest


def sync(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to the disk, as far as its file system does so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_temporary(name: str) -> bool:
    """Return whether a file of this name was left by a process that was killed while it wrote atomically."""
    return re.fullmatch(r"\..+\.[0-9a-f]{8}", name.rpartition("/")[2]) is not None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _write_and_sync(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
