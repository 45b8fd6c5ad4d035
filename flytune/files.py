"""Reading of regular files only, hashes of files, and files and folders that appear when they are
complete."""

import errno
import hashlib
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flytune.errors import FlytuneError, StorageFull, chain

CHUNK = 8 * 2**20
"""Bytes of a file in memory at a time; s3fs and gcsfs collect up to 100 MB of them for a part of an
upload."""
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
"""Kinds of what is not a file, by the bits of its mode."""
_PACKAGE = Path(__file__).resolve().parent


def clone() -> Path | None:
    """Return the clone of the project: the current folder, or the one that Flytune is imported from; None if
    neither is one."""
    for root in (Path(), _PACKAGE.parent):
        if (root / "workflows" / "finetune.py").is_file() and (root / "flytune" / "__init__.py").is_file():
            return root.absolute()
    return None


_SHIPPED = _PACKAGE / "shipped"
"""Folder in a wheel with copies of shapes.yaml and other files of the project's root (setup.py)."""
ROOT = clone() if _SHIPPED.is_dir() else _PACKAGE.parent
"""The project's folder: of a clone or an image; None where a wheel is used outside of a clone."""
SETTINGS = ROOT or _SHIPPED
"""Folder of shapes.yaml, cluster.yaml, accelerators.yaml, deepspeed_configs/ and chat_templates/."""


class FileRefusedError(OSError):
    """A path that is not read: no regular file, or a file that is too large."""

    def __init__(self, path: str | Path, problem: str) -> None:
        super().__init__(errno.EINVAL, problem, os.fspath(path))

    def __str__(self) -> str:
        return str(self.strerror)


def open_regular(path: str | Path, largest: int | None = None) -> io.BufferedIOBase:
    """Open a regular file for reading. A pipe or a device is not opened: it would block, never end, or be
    changed.

    A file of 0 bytes is empty and is not read: files of the kernel (/proc/kmsg) have that size, and some of
    them block.

    Args:
        path: the file.
        largest: number of bytes that a file may have.

    Raises:
        FileRefusedError: it is not a regular file, or has more bytes than `largest`.
        OSError: it cannot be opened.
    """
    # Before it is opened, which may already have an effect on a device.
    check_regular(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if problem := _problem(status, largest):
        os.close(descriptor)
        raise FileRefusedError(path, problem)
    if not status.st_size:
        os.close(descriptor)
        return io.BytesIO()
    return os.fdopen(descriptor, "rb")


def check_regular(path: str | Path, largest: int | None = None) -> None:
    """Check that a path is a regular file, or a link to one.

    Raises: as `open_regular`.
    """
    if problem := _problem(os.stat(path), largest):
        raise FileRefusedError(path, problem)


def read_regular(path: str | Path, largest: int) -> bytes:
    """Return the content of a regular file of `largest` bytes or fewer.

    Raises: as `open_regular`.
    """
    with open_regular(path, largest) as file:
        return read_within(file, largest, path)


def read_within(file: Any, largest: int, path: str | Path) -> bytes:
    """Return the content of an open file of `largest` bytes or fewer; `path` is its name.

    Raises:
        FileRefusedError: it has more.
    """
    parts, size = list[bytes](), 0
    # In parts: Python allocates all that is asked for, however small the file is.
    while size <= largest and (part := bytes(file.read(min(CHUNK, largest + 1 - size)))):
        parts.append(part)
        size += len(part)
    if size > largest:
        raise FileRefusedError(path, f"more than the {largest:,} bytes that are read")
    return b"".join(parts)


def _problem(status: os.stat_result, largest: int | None) -> str | None:
    if stat.S_ISDIR(status.st_mode):
        return "a folder; name a file"
    if not stat.S_ISREG(status.st_mode):
        return f"{_KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}, which is not read; name a regular file"
    return _too_large(status.st_size, largest) if largest is not None and status.st_size > largest else None


def _too_large(size: int, largest: int) -> str:
    return f"{size:,} bytes, more than the {largest:,} that are read"


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a regular file's content as 64 hex digits."""
    with open_regular(file) as content:
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
    """Yield a temporary path next to `path` for a new file or folder, which is renamed to `path` if the block
    succeeds.

    If the block fails, the file or folder is deleted. A reader of `path` sees the old content or the new
    content.

    Args:
        path: a file, which is replaced if it exists, or a folder. The parent folder is created.
        keep_existing: whether a folder that another process has written to `path` meanwhile is kept, and this
            one deleted.

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


@contextmanager
def new_output(path: Path) -> Iterator[Path]:
    """Yield a temporary path as `written_atomically` does, for a file or folder that a person has named.

    Raises:
        StorageFull: the disk or the quota can hold no more; nothing is left there.
    """
    try:
        with written_atomically(path) as temporary:
            yield temporary
    except Exception as error:
        if (full := full_error(error)) is None:
            raise
        reason = getattr(full, "strerror", None) or " ".join(str(full).split())[:200]
        todo = "nothing is left there: make room, or give another path"
        raise StorageFull(f"{path}: cannot be written: {reason}; {todo}") from error


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a disk, a quota or a file that can hold no more."""

FULL_TEXT = (
    r"No space left on device|Disk quota exceeded|File too large"  # the system, whatever library repeats it
    r"|\[Errno (?:27|28|122)\]|\(os error (?:27|28|122)\)"
    r"|database or disk is full"  # SQLite
    r"|inline_container\.cc:\d+\] \. unexpected pos"  # torch.save
    r"|\d+ requested and \d+ written"  # numpy.save
    r"|QuotaExceeded|StorageFull|EntityTooLarge"  # Ceph, MinIO, S3
)
"""Words of libraries for a disk or a quota that can hold no more; many of their errors have no number."""


def full_error(error: BaseException | None) -> BaseException | None:
    """Return the error among one and its causes that says that a disk can hold no more; libraries have
    classes of their own."""
    links = list(chain(error))
    for link in links:
        if getattr(link, "errno", None) in FULL:
            return link
    # Errors of our own have said it in words of their own.
    others = (link for link in links if not isinstance(link, FlytuneError))
    return next((link for link in others if re.search(FULL_TEXT, str(link))), None)


def link_or_copy(file: Path, path: Path) -> None:
    """Hard-link a large file that nobody edits; copy it to another file system."""
    try:
        os.link(file.resolve(), path)
    except OSError:
        shutil.copy(file, path)


@contextmanager
def created_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path` for a new file, which gets the name `path` if the block succeeds.

    A file that is there already stays as it is, because readers of a file that is replaced fail on network
    file systems.
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

    Of several processes that create the same file at once, exactly one gets True, on network file systems as
    well.
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
