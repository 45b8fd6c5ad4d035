"""A folder, or any fsspec address, that files are stored in: streamed, hashed, and tried again while it is away."""

import errno
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flytune.errors import StorageError

log = logging.getLogger(__name__)
_T = TypeVar("_T")

CHUNK = 8 * 2**20
"""Bytes of a file that are held at once; s3fs and gcsfs gather up to 100 MB of them for a part of an upload."""
WAITS = (1, 2, 4, 8, 15, 30, 30, 30)
"""Seconds between tries: two minutes in all."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_TODO = {
    "away": "it did not come back within two minutes",
    "full": "it is full: make room, or lower checkpoints.save_total_limit",
    "refused": "it refuses: check the credentials, and that they may read, write, list and delete there",
}


def failure(error: BaseException) -> str | None:
    """How a storage fails: `away` (it may come back), `full` or `refused`; nothing for what is no storage's error."""
    if not isinstance(error, OSError) and type(error).__module__.split(".")[0] in ("builtins", "flytune"):
        return None
    # Credentials are fetched anew when they have run out, mostly.
    if "expire" in str(error).lower():
        return "away"
    number = getattr(error, "errno", None)
    # Ceph's and MinIO's words for it; s3fs knows neither.
    if number in _FULL or "QuotaExceeded" in str(error) or "StorageFull" in str(error):
        return "full"
    # botocore's NoCredentialsError, google.auth's RefreshError and DefaultCredentialsError are no OSErrors.
    if number in _REFUSED or isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return "refused"
    return "away"


class Storage:
    """Files below one address, by their names relative to it."""

    def __init__(self, address: str, key: str = "checkpoints.folder") -> None:
        """`key` is the setting that names the address, for errors."""
        from fsspec.core import url_to_fs

        self.address, self.key = address.rstrip("/"), key
        try:
            self.filesystem, self.root = url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise StorageError(f"{key}: {address}: cannot be opened: {error}") from error
        self.is_local = "file" in self.filesystem.protocol

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        """Of the folders and files right below the address, sorted; none where there is no such place."""

        def listed() -> list[str]:
            self.filesystem.invalidate_cache()
            try:
                found = self.filesystem.ls(self.root, detail=False)
            except FileNotFoundError:
                return []
            return sorted({str(name).rstrip("/").rpartition("/")[2] for name in found})

        return self._tried("", listed)

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of all files below `folder`, by their names relative to it."""
        base = self.path(folder)

        def found() -> dict[str, int]:
            self.filesystem.invalidate_cache()
            files = self.filesystem.find(base, detail=True)
            return {name.removeprefix(base).lstrip("/"): info["size"] for name, info in files.items()}

        return self._tried(folder, found)

    def read(self, name: str) -> bytes:
        """A small file.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._tried(name, lambda: bytes(self.filesystem.cat_file(self.path(name))))

    def write(self, name: str, content: bytes) -> None:
        """A small file, whole or not at all."""
        if self.is_local:
            self._tried(name, lambda: _write_durably(Path(self.path(name)), content))
        else:
            self._stored(name, lambda: self.filesystem.pipe_file(self.path(name), content))

    def put(self, file: Path, name: str) -> str:
        """Stores a file of this machine, and returns its sha256. On a file system it is moved, and safe from a crash then."""
        if self.is_local:
            return self._stored(name, lambda: _move_durably(file, Path(self.path(name))))
        return self._stored(name, lambda: self._upload(file, name))

    def _upload(self, file: Path, name: str) -> str:
        self.filesystem.makedirs(self.path(name).rpartition("/")[0], exist_ok=True)
        with file.open("rb") as source, self.filesystem.open(self.path(name), "wb") as target:
            return _copy(source, target)

    def get(self, name: str, file: Path | None = None) -> str:
        """Fetches a stored file into `file`, if one is given, and returns its sha256.

        Raises:
            FileNotFoundError: it is not stored.
        """

        def fetch() -> str:
            with self.filesystem.open(self.path(name), "rb") as source:
                if file is None:
                    return _copy(source, None)
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as target:
                    return _copy(source, target)

        return self._tried(name, fetch)

    def remove(self, folder: str) -> None:
        """A folder with all that is in it; nothing where it is gone."""

        def gone() -> None:
            try:
                self.filesystem.rm(self.path(folder), recursive=True)
            except FileNotFoundError:
                log.debug("%s: gone already", self.path(folder))

        self._tried(folder, gone)

    def _stored(self, name: str, store: Callable[[], _T]) -> _T:
        try:
            return self._tried(name, store)
        except FileNotFoundError as error:
            raise StorageError(f"{self.key}: {self.address}/{name}: there is no such place: {error}") from error

    def _tried(self, name: str, operation: Callable[[], _T]) -> _T:
        """What `operation` returns; it is tried again while the storage is away. That a file is missing is an answer."""
        for wait in (*WAITS, None):
            try:
                return operation()
            except FileNotFoundError:
                raise
            except Exception as error:  # each file system has errors of its own; botocore's are not even OSErrors
                how = failure(error)
                if how is None:
                    raise
                said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                if how != "away" or wait is None:
                    where = f"{self.address}/{name}".rstrip("/")
                    raise StorageError(f"{self.key}: {where}: {_TODO[how]}: {said}") from error
                log.warning("%s/%s: %s; trying again in %d s", self.address, name, said, wait)
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")


def _copy(source: Any, target: Any) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


def _move_durably(file: Path, target: Path) -> str:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        os.fsync(content.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    # Renamed, as staging lies beside it; but not where checkpoints.folder is file://, say.
    shutil.move(file, target)
    _sync(target)
    _sync(target.parent)
    return digest


def _write_durably(target: Path, content: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Has a file, or the names in a folder, outlive a crash of the machine, as far as its file system keeps that promise."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
