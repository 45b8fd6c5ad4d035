"""artifact.json, the list of an artifact's files, and functions that list files and read records."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from tqdm import tqdm

from flytune.errors import ExportError
from flytune.files import sha256_of
from flytune.schema import Record, Strict

_Kind = TypeVar("_Kind", bound=Record)

CONTENTS = "artifact.json"


class StoredFile(Strict):
    """A stored file with its size and hash."""

    file: str
    """Path relative to the record that lists it, with slashes."""
    size: int
    """Size in bytes."""
    sha256: str


class Contents(Record):
    """artifact.json, written last: an artifact without one is incomplete."""

    files: list[StoredFile]


def record(kind: type[_Kind], path: Path) -> _Kind:
    """Read a record.

    Raises:
        ExportError: the file is missing, or is no such record.
    """
    try:
        return kind.read(path)
    except FileNotFoundError:
        raise ExportError(f"{path}: missing, so its folder is incomplete; nothing was stored") from None
    except ValidationError as error:
        raise ExportError(f"{path}: not a {kind.__name__} ({error.error_count()} mistakes); nothing was stored") from None


def stored_file(path: Path, name: str, sha256: str | None = None) -> StoredFile:
    """Return the size and hash of a file, listed as `name`; a file whose hash is given is not read."""
    return StoredFile(file=name, size=path.stat().st_size, sha256=sha256 or sha256_of(path))


def list_files(folder: Path, hashes: Mapping[str, str] | None = None, label: str = "hashing") -> list[StoredFile]:
    """List every file below `folder` with size and hash, sorted by path.

    Args:
        folder: all its subfolders are listed too.
        hashes: known hashes by relative path; these files are not read.
        label: name of the progress bar.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    bar = tqdm(zip(paths, names, strict=True), total=len(paths), desc=label, unit=" files", delay=2)
    return [stored_file(path, name, (hashes or {}).get(name)) for path, name in bar]
