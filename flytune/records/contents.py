"""artifact.json: what an artifact holds, file by file, and how an artifact's records are read."""

import hashlib
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from flytune.errors import ExportError
from flytune.schema import Record, Strict

_Kind = TypeVar("_Kind", bound=Record)

CONTENTS = "artifact.json"


class StoredFile(Strict):
    """One file of what is stored."""

    file: str
    """Relative to the record that lists it, with slashes."""
    size: int
    """In bytes."""
    sha256: str


class Contents(Record):
    """artifact.json, written last: an artifact without one is not whole."""

    files: list[StoredFile]


def record(kind: type[_Kind], path: Path) -> _Kind:
    """Reads a record.

    Raises:
        ExportError: it is not there, or is none.
    """
    try:
        return kind.read(path)
    except FileNotFoundError:
        raise ExportError(f"{path}: not there, so what it speaks of is not whole; nothing was stored") from None
    except ValidationError as error:
        raise ExportError(f"{path}: not a {kind.__name__} ({error.error_count()} mistakes); nothing was stored") from None


def stored(path: Path, name: str) -> StoredFile:
    """A file as `Contents` lists it, under `name`."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return StoredFile(file=name, size=path.stat().st_size, sha256=digest)
