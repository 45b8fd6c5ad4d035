"""The one way to any address: a folder of this machine, or an fsspec address (s3://bucket/folder)."""

import errno
import logging
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from flytune import addresses, files, names
from flytune.addresses import reason
from flytune.errors import FlytuneError, StorageError, StorageFull, StorageRefused

log = logging.getLogger(__name__)
_T = TypeVar("_T")

WAITS = (1, 2, 4, 8, 15, 30, 30, 30)
"""Seconds between tries: two minutes in all."""

_COPIES_AT_ONCE = 16
_TAIL = 4096
_LARGEST = 2 * 10**9
"""Bytes of a small file of this machine; records are read whole."""
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_TODO = {
    "away": "it did not come back within two minutes",
    "full": "it is full: make room, or lower checkpoints.save_total_limit",
    "refused": "it refuses: check the credentials, and that they may read, write, list and delete there",
}
"""Words of errors, by the kind of failure."""
_ERRORS = {"full": StorageFull, "refused": StorageRefused}


def failure(error: BaseException) -> str | None:
    """Return the kind of a storage's failure: `away` (it may come back), `full` or `refused`; None for any
    other error."""
    if not isinstance(error, OSError) and type(error).__module__.split(".")[0] in ("builtins", "flytune"):
        return None
    # Expired credentials are usually renewed.
    if "expire" in str(error).lower():
        return "away"
    number = getattr(error, "errno", None)
    if number in files.FULL or re.search(files.FULL_TEXT, str(error)):
        return "full"
    # botocore's NoCredentialsError, google.auth's RefreshError and DefaultCredentialsError are not OSErrors.
    if number in _REFUSED or isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return "refused"
    return "away"


class Storage:
    """Files below one address, by their names relative to it; the name "" is the address itself.

    Every error of a file system becomes `error`, apart from the FileNotFoundError of `read`, `read_part`,
    `get`, `download`, `info` and `entries`: a missing file is an answer.
    """

    def __init__(
        self,
        address: str | Path,
        key: str = "checkpoints.folder",
        *,
        error: Callable[[str], Exception] = StorageError,
        failed: str = "",
        retry: bool = True,
    ) -> None:
        """Open an address.

        Args:
            address: a folder, or any fsspec address.
            key: the setting that names the address, for messages; may be empty.
            error: the class of the errors that are raised.
            failed: the words of messages, such as "cannot be reached"; by default they follow from the
                operation.
            retry: whether an operation is tried again for two minutes while the storage is away.

        Raises:
            error: the address has credentials, no installed package knows its protocol, or it cannot be
                opened.
        """
        import fsspec

        addresses.check(address, key or "the address", error)
        self.address, self.error, self.failed, self.retry = str(address).rstrip("/"), error, failed, retry
        self.where = f"{key}: {self.address}" if key else self.address
        try:
            self.filesystem, root = fsspec.core.url_to_fs(str(address))
        except Exception as failed_opening:
            raise error(
                f"{self.where}: {failed or 'cannot be opened'}: {reason(failed_opening)}"
            ) from failed_opening
        self.root = str(root).rstrip("/")
        self.is_local = "file" in self.filesystem.protocol

    def path(self, name: str = "") -> str:
        """Return the path of a file or folder as the file system names it. Each name passes here before it is
        used.

        Raises:
            error: the name is refused (flytune.names).
        """
        if not name:
            return self.root or "/"
        problem = names.problem(name)
        if problem:
            raise self.error(f"{self.where}: the name {ascii(name)[:80]} {problem}; it is not used")
        return f"{self.root}/{name}"

    def _changed_path(self, name: str) -> str:
        """Return the path of a file that is written or deleted: no link to it leads out of a local storage,
        as others may."""
        path = self.path(name)
        if self.is_local and name:
            folder, root = Path(path).parent.resolve(), Path(self.root or "/").resolve()
            if not folder.is_relative_to(root):
                raise self.error(
                    f"{self.where}: {name}: a symbolic link leads out of this folder; nothing is changed "
                    "there"
                )
        return path

    def url(self, name: str) -> str:
        """Return the address of a file or folder; of a local one, its path."""
        return str(self.filesystem.unstrip_protocol(self.path(name))).removeprefix("file://")

    def exists(self, name: str = "") -> bool:
        """Return whether there is a file or folder of that name."""

        def look() -> bool:
            self.filesystem.invalidate_cache()
            return bool(self.filesystem.exists(self.path(name)))

        return self._try_at_place(name, look)

    def info(self, name: str = "") -> dict[str, Any]:
        """Return fsspec's facts about a file or folder: at least its `name`, `size` and `type`."""

        def look() -> dict[str, Any]:
            self.filesystem.invalidate_cache()
            return dict(self.filesystem.info(self.path(name)))

        return self._try(name, look)

    def entries(self, name: str = "") -> list[dict[str, Any]]:
        """List fsspec's facts about the files and folders directly in a folder."""

        def look() -> list[dict[str, Any]]:
            self.filesystem.invalidate_cache()
            return list(self.filesystem.ls(self.path(name), detail=True))

        return self._try(name, look)

    def names(self, folder: str = "") -> list[str]:
        """List the usable names of the files and folders directly in a folder, sorted; none if the folder
        does not exist."""

        def look() -> list[str]:
            self.filesystem.invalidate_cache()
            try:
                # Without details: a file that is deleted meanwhile has none.
                paths = self.filesystem.ls(self.path(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted({str(path).rstrip("/").rpartition("/")[2] for path in paths})

        return names.usable(self._try(folder, look), self.where)

    def files(self, folder: str = "", depth: int | None = None) -> dict[str, dict[str, Any]]:
        """Return fsspec's facts about all files below a folder, down to `depth` levels, by their relative
        names, if usable."""
        base = self.path(folder)

        def look() -> dict[str, dict[str, Any]]:
            self.filesystem.invalidate_cache()
            infos = self.filesystem.find(base, maxdepth=depth, detail=True)
            return {str(path).removeprefix(base).removeprefix("/"): info for path, info in infos.items()}

        infos = self._try_at_place(folder, look)
        return {name: infos[name] for name in names.usable(infos, self.where)}

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of all files below `folder`, by their names relative to it."""
        return {name: info["size"] for name, info in self.files(folder).items()}

    def modified(self, name: str) -> datetime | None:
        """Return the time of a file's last change; None if it is not known. Clocks differ: for display
        only."""

        def look() -> datetime | None:
            try:
                when: datetime = self.filesystem.modified(self.path(name))
            except (OSError, NotImplementedError, KeyError):
                return None
            return when.astimezone(UTC) if when.tzinfo else when.replace(tzinfo=UTC)

        return self._try_at_place(name, look)

    def read(self, name: str = "", largest: int = _LARGEST) -> bytes:
        """Return the content of a small file, of `largest` bytes or fewer."""

        def load() -> bytes:
            try:
                if self.is_local:
                    return files.read_regular(self.path(name), largest)
                with self.filesystem.open(self.path(name), "rb") as opened:
                    return files.read_within(opened, largest, self.path(name))
            except NotADirectoryError as error:  # a file cannot hold others
                raise FileNotFoundError(str(error)) from error

        return self._try(name, load)

    def read_each(self, names: list[str], largest: int = _LARGEST) -> dict[str, bytes | Exception]:
        """Return the contents of small files by name, read at the same time; for one that cannot be read, the
        error."""
        paths = {self.path(name): name for name in names}
        if self.is_local:
            return {name: _content_or_error(path, largest) for path, name in paths.items()}
        contents = self._try_at_place("", lambda: self.filesystem.cat(list(paths), on_error="return"))
        return {name: contents.get(path, FileNotFoundError(path)) for path, name in paths.items()}

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a small file; a reader sees the old content or the new content."""
        if self.is_local:
            self._try(
                name, lambda: files.write_durably(Path(self._changed_path(name)), content), "written to"
            )
        else:
            self._try_at_place(
                name, lambda: self.filesystem.pipe_file(self.path(name), content), "written to"
            )

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file that does not exist yet; return False if it exists. Of several writers at once,
        one gets True.

        On S3 and Google Cloud Storage this is a conditional PUT (If-None-Match, ifGenerationMatch). It is
        never tried again: a second try would find the file of a first one whose answer was lost.
        """
        path = self._changed_path(name)
        try:
            if self.is_local:
                return files.create_durably(Path(path), content)
            self.filesystem.pipe_file(self.path(name), content, mode="create")
        except FileExistsError:
            return False
        except Exception as error:
            # s3fs has no class for a condition that is not met.
            if "PreconditionFailed" in str(error) or "pre-conditions" in str(error):
                return False
            raise self._translated(name, error, "written to") from error
        return True

    def put(self, file: Path, name: str) -> str:
        """Store a file of this machine and return its SHA-256. A local storage moves it, and it then survives
        a crash."""
        if self.is_local:
            return self._try_at_place(
                name, lambda: files.move_durably(file, Path(self._changed_path(name))), "written to"
            )
        return self._try_at_place(name, lambda: self._upload(file, name), "written to")

    def _upload(self, file: Path, name: str) -> str:
        self.filesystem.makedirs(self.path(name).rpartition("/")[0], exist_ok=True)
        with file.open("rb") as source, self.filesystem.open(self.path(name), "wb") as target:
            return files.copy_stream(source, target)

    def copy(self, file: Path, name: str) -> None:
        """Store a copy of a file of this machine; it appears under its name when it is complete."""

        def store() -> None:
            path = self._changed_path(name)
            if not self.is_local:  # object stores show an object when all of it is uploaded
                self.filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
                self.filesystem.put_file(str(file), path)
                return
            with files.written_atomically(Path(path)) as temporary:
                self.filesystem.put_file(str(file), str(temporary))
                # Some file systems find out only now that they are full.
                files.sync(temporary)

        self._try_at_place(name, store, "written to")

    def get(self, name: str, file: Path | None = None) -> str:
        """Download a file into `file`, if one is given, and return its SHA-256."""

        def fetch() -> str:
            path = self.path(name)
            with files.open_regular(path) if self.is_local else self.filesystem.open(path, "rb") as source:
                if file is None:
                    return files.copy_stream(source, None)
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as target:
                    return files.copy_stream(source, target)

        return self._try(name, fetch)

    def read_part(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of a file from `start` to before `end`, without the others."""
        return self._try(name, lambda: bytes(self.filesystem.cat_file(self.path(name), start=start, end=end)))

    def copy_from(self, source: "Storage", names: Mapping[str, str], label: str = "copying") -> None:
        """Copy large files of another storage, which nobody edits, to this one.

        Within one store, the store copies them: no byte passes through this machine. From folder to folder
        they are linked if possible. Between two stores they are streamed, without a copy on the disk.

        Args:
            source: storage of the files.
            names: names of the files there, by their names here.
            label: name of the progress bar.
        """
        sizes = {target: source.info(name)["size"] for target, name in names.items()}
        targets = sorted(names, key=lambda target: names[target])
        one_store = not self.is_local and type(self.filesystem) is type(source.filesystem)
        with tqdm(total=sum(sizes.values()), desc=label, unit="B", unit_scale=True, delay=2) as bar:
            for start in range(0, len(targets), _COPIES_AT_ONCE):
                part = targets[start : start + _COPIES_AT_ONCE]
                if one_store:
                    theirs = [source.path(names[target]) for target in part]
                    ours = [self.path(target) for target in part]
                    copy = partial(self.filesystem.copy, theirs, ours, on_error="raise")
                    self._try_at_place("", copy, "written to")
                else:
                    for target in part:
                        self._try_at_place(
                            target, partial(self._stream, source, names[target], target), "written to"
                        )
                for target in part:
                    self._await_copy(source, names[target], target, sizes[target])
                    bar.update(sizes[target])

    def _stream(self, source: "Storage", name: str, target: str) -> None:
        path = self._changed_path(target)
        if self.is_local:
            with files.written_atomically(Path(path)) as temporary:
                if source.is_local:
                    files.link_or_copy(Path(source.path(name)), temporary)
                else:
                    source.filesystem.get_file(source.path(name), str(temporary))
                files.sync(temporary)
            return
        self.filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        with (
            source.filesystem.open(source.path(name), "rb") as opened,
            self.filesystem.open(path, "wb") as written,
        ):
            files.copy_stream(opened, written)

    def _await_copy(self, source: "Storage", name: str, target: str, size: int) -> None:
        """Wait until a copy is complete, by its size and its last bytes: Azure copies after it has
        answered."""
        start = max(0, size - _TAIL)
        for wait in (*WAITS, None):
            self.filesystem.invalidate_cache()
            is_full_size = self.info(target)["size"] == size
            if is_full_size and self.read_part(target, start, size) == source.read_part(name, start, size):
                return
            if wait is not None:
                time.sleep(wait)
        raise self.error(f"{self.where}/{target}: the copy of {source.url(name)} is incomplete; run again")

    def download(self, name: str, file: Path) -> None:
        """Download a file by the file system's own way, which may be faster than `get`, and is not hashed."""
        file.parent.mkdir(parents=True, exist_ok=True)

        def fetch() -> None:
            if self.is_local:
                files.check_regular(self.path(name))
            self.filesystem.get_file(self.path(name), str(file))

        self._try(name, fetch)

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with its content; do nothing if it does not exist. Of a link, only the
        link is deleted."""

        def delete() -> None:
            self.filesystem.invalidate_cache()
            path = self._changed_path(name)
            try:
                if self.is_local and Path(path).is_symlink():
                    Path(path).unlink()
                else:
                    self.filesystem.rm(path, recursive=True)
            except FileNotFoundError:
                log.debug("%s: deleted already", self.path(name))

        self._try(name, delete, "written to")

    def _try_at_place(self, name: str, operation: Callable[[], _T], verb: str = "read") -> _T:
        """Do as `_try`, for operations whose FileNotFoundError means that the place itself is missing."""
        try:
            return self._try(name, operation, verb)
        except FileNotFoundError as error:
            if not self.retry:
                raise self._translated(name, error, verb) from error
            raise self._error_of("refused")(
                f"{self.where}/{name}: there is no such place: {error}"
            ) from error

    def _try(self, name: str, operation: Callable[[], _T], verb: str = "read") -> _T:
        """Return what `operation` returns. It is tried again while the storage is away; FileNotFoundError is
        passed on."""
        for wait in (*(WAITS if self.retry else ()), None):
            try:
                return operation()
            except (FileNotFoundError, FlytuneError):
                raise
            except files.FileRefusedError as error:
                raise self.error(f"{f'{self.where}/{name}'.rstrip('/')}: {error}") from None
            # Each file system has errors of its own; botocore's are not even OSErrors.
            except Exception as error:
                kind = failure(error)
                if kind is None and self.retry:
                    raise
                if kind != "away" or wait is None:
                    raise self._translated(name, error, verb) from error
                log.warning("%s/%s: %s; trying again in %d s", self.address, name, reason(error), wait)
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _error_of(self, kind: str | None) -> Callable[[str], Exception]:
        """Return the class of the errors of a kind of failure: the storage's own, or one of those that others
        were given."""
        return _ERRORS.get(kind or "", StorageError) if self.error is StorageError else self.error

    def _translated(self, name: str, error: Exception, verb: str) -> Exception:
        kind = failure(error)
        if self.retry:
            return self._error_of(kind)(
                f"{f'{self.where}/{name}'.rstrip('/')}: {_TODO[kind or 'away']}: {reason(error)}"
            )
        todo = ""
        if kind == "refused":
            todo = f"; {_TODO['refused']}"
        elif kind == "full":
            todo = "; make room there, and run it again"
        file = f"{name} " if name else ""
        return self._error_of(kind)(
            f"{self.where}: {file}{self.failed or f'cannot be {verb}'}: {reason(error)}{todo}"
        )


def _content_or_error(path: str, largest: int) -> bytes | Exception:
    try:
        return files.read_regular(path, largest)
    except OSError as error:
        return error
