"""Data sources: files, folders and fsspec addresses, and a fingerprint of their content."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from flytune.data.hub import resolved_revision
from flytune.errors import DataError
from flytune.files import sha256_of
from flytune.recipe import Data
from flytune.storage import Storage

KINDS = {"jsonl": "json lines", "ndjson": "json lines", "json": "json", "csv": "csv", "parquet": "parquet"}
"""Kinds of files by suffix; all but Parquet may also end in .gz."""
_KINDS_SHOWN = "JSON Lines (.jsonl, .ndjson), JSON (.json), CSV (.csv) or Parquet (.parquet)"


class Files(NamedTuple):
    """Files of one path or address, in order."""

    filesystem: Any
    """An fsspec file system."""
    files: list[str]
    """Paths in the file system."""
    labels: list[str]
    """Paths in messages: below the path in the recipe."""
    saved: bool
    """True for a folder of `datasets.save_to_disk`."""


def kind(name: str) -> str | None:
    """Return the kind of a file with this name (a value of KINDS), or None."""
    return KINDS.get(name.removesuffix(".gz").rpartition(".")[2].lower())


def locate(path: str, key: str) -> Files:
    """Return the data files at `path`; `key` is the recipe's name for it, for messages.

    Of a folder, these are the data files directly in it, sorted by name.

    Raises:
        DataError: nothing is there, it cannot be reached, or it is not data.
    """
    entries: list[tuple[str, str]] = []
    storage = _storage(path, key)
    filesystem, root = storage.filesystem, storage.path()
    try:
        is_file = storage.info()["type"] == "file"
        if not is_file:
            # A link has a type of its own.
            entries = sorted((entry["name"], _type(filesystem, entry)) for entry in storage.entries())
    except FileNotFoundError:
        raise DataError(f"{key}: {path}: no such file or folder{_beside(path)}") from None
    if is_file and kind(root) is None:
        raise DataError(f"{key}: {path}: unknown kind of file; known are {_KINDS_SHOWN}")
    if is_file:
        return Files(filesystem, [root], [path], saved=False)
    return _folder(path, key, filesystem, entries)


def _type(filesystem: Any, entry: dict[str, Any]) -> str:
    is_linked_file = entry.get("islink") and filesystem.isfile(entry["name"])
    return "file" if is_linked_file else str(entry["type"])


def size(path: str, key: str) -> int | None:
    """Return the stored bytes of all data files at `path`; None if they are not read as files (`save_to_disk`).

    Raises:
        DataError: as `locate`.
    """
    found = locate(path, key)
    return None if found.saved else sum(found.filesystem.info(file)["size"] or 0 for file in found.files)


def _folder(path: str, key: str, filesystem: Any, entries: list[tuple[str, str]]) -> Files:
    names = {name: name.rstrip("/").rpartition("/")[2] for name, _ in entries}
    saved = bool({"state.json", "dataset_dict.json"} & set(names.values()))
    if saved:
        files = sorted(filesystem.find(path))
    else:
        files = [name for name, what in entries if what == "file" and kind(name) and not names[name].startswith((".", "_"))]
    if not files:
        raise DataError(f"{key}: {path}: no file of {_KINDS_SHOWN} in this folder; {_listing(list(names.values()))}")
    labels = [f"{path.rstrip('/')}/{name.rpartition('/')[2]}" for name in files]
    return Files(filesystem, files, labels, saved)


def fingerprint(data: Data) -> str:
    """Return a hash of the content of a recipe's data section: 64 hex digits that change when the content does.

    Local files are hashed completely. Of files at an address, it hashes the checksum that the file system keeps, with name
    and size; of a data set on the hub, the commit.

    Raises:
        DataError: a source does not exist or cannot be reached.
    """
    parts: list[tuple[str, ...]] = []
    for key, source in data.all_sources.items():
        if source.dataset_name is not None:
            revision = resolved_revision(source.dataset_name, source.revision, key)
            parts.append((f"{key}.dataset_name", source.dataset_name, revision))
    paths = {f"{key}.path": source.path for key, source in data.all_sources.items()}
    for key, path in {**paths, "data.heldout_path": data.heldout_path}.items():
        if path is not None:
            parts += [(key, *part) for part in _digests(locate(path, key))]
    if data.chat_template is not None:
        parts.append(("chat_template", read_chat_template(data.chat_template)))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _digests(source: Files) -> Iterator[tuple[str, str]]:
    local = "file" in source.filesystem.protocol
    for file, label in tqdm(list(zip(source.files, source.labels, strict=True)), desc="fingerprint", unit=" files", delay=2):
        name = label.rpartition("/")[2]
        if local:
            yield name, _file_sha256(Path(file), label)
        else:
            info = source.filesystem.info(file)
            kept = next((info[mark] for mark in ("ETag", "etag", "md5Hash", "crc32c") if info.get(mark)), None)
            yield name, f"{info.get('size')} {kept or source.filesystem.checksum(file)}"


def _file_sha256(file: Path, label: str) -> str:
    try:
        return sha256_of(file)
    except OSError as error:
        raise DataError(f"{label}: cannot be read: {error.strerror or error}") from None


def read_chat_template(path: str) -> str:
    """Return the content of the recipe's Jinja file, or of the one at an address.

    Raises:
        DataError: it is not there, or not text.
    """
    try:
        return _storage(path, "data.chat_template").read().decode("utf-8")
    except FileNotFoundError:
        raise DataError(f"data.chat_template: {path}: no such file{_beside(path)}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"data.chat_template: {path}: cannot be read: {error}") from error


def _storage(path: str, key: str) -> Storage:
    return Storage(path, key, error=DataError, failed="cannot be read", retry=False)


def _beside(path: str) -> str:
    """Describe the folder in which a path is missing."""
    if "://" in path:
        return " at this address, or these credentials have no access to it"
    parent = Path(path).expanduser().absolute().parent
    if not parent.is_dir():
        return f"; its folder {parent} does not exist either"
    return f"; the folder {parent} {_listing([entry.name for entry in parent.iterdir()], verb='has')}"


def _listing(names: list[str], verb: str = "it has") -> str:
    shown = sorted(names)[:8]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{verb} {', '.join(shown)}{more}" if shown else f"{verb} nothing"
