"""Local copies of what is at fsspec addresses (s3://bucket/artifact): a base model's files, or a complete
folder."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from flytune import caches, names
from flytune.errors import RecipeError, StorageError
from flytune.files import sha256_of
from flytune.models import weight_index
from flytune.records.contents import CONTENTS, Contents, FileDiffers
from flytune.schema import RecordError
from flytune.storage import Storage

INDEX = weight_index.INDEX
TEXTS = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
"""Suffixes of config and tokenizer files; transformers looks for no others."""
_MODEL = "model.name_or_path"


class _Listing(NamedTuple):
    """Files at an address."""

    storage: Storage
    files: list[str]
    identity: str
    """16 hex digits that change when the content does."""


def identity(address: str) -> str:
    """Return 16 hex digits that change when the model at an address does, as far as its storage keeps
    checksums or times.

    Raises:
        RecipeError: it cannot be read, or there is no model.
        StorageError: its storage is away.
    """
    return _list_model(address).identity


def files_to_fetch(files: Iterable[str], index: bytes | None, code: bool, where: str) -> list[str]:
    """Return those of a model's files that loading it needs: config, tokenizer, and the weights that
    transformers chooses.

    Args:
        files: names of all files.
        index: content of model.safetensors.index.json, if there is one.
        code: whether Python files are needed too.
        where: what names the model in messages.

    Raises:
        RecipeError: there are no safetensors, or the index cannot be read.
    """
    files = sorted(names.usable((file for file in files if "/" not in file), where))
    # With an adapter_config.json beside it, transformers would load that adapter in place of the model.
    files = [file for file in files if file != "adapter_config.json"]
    texts = [file for file in files if PurePosixPath(file).suffix in TEXTS | ({".py"} if code else set())]
    weights = [file for file in files if file.endswith(".safetensors")]
    if "model.safetensors" in weights:
        weights = ["model.safetensors"]
    elif index is not None:
        # Mistral's repositories contain all weights twice, once as consolidated.safetensors.
        try:
            weights = sorted(set(weight_index.weight_map(index).values()))
        except weight_index.IndexRefused as error:
            raise RecipeError(f"{where}: {INDEX}: {error}") from None
    if not weights:
        raise RecipeError(
            f"{where}: it has no *.safetensors, and no other weights are read; it holds "
            f"{', '.join(files[:8])}"
        )
    return texts + weights


def fetch_model(address: str, weights: bool, code: bool) -> Path:
    """Return the local folder with the files of the model at an address; another folder once the files have
    changed.

    Args:
        address: fsspec address of a model or an artifact.
        weights: whether the weights are needed.
        code: whether Python files are needed.

    Raises: as `identity`.
    """

    def choose(listing: _Listing) -> list[str]:
        index = listing.storage.read(INDEX) if INDEX in listing.files else None
        model = files_to_fetch(listing.files, index, code, f"{_MODEL}: {address}")
        return [file for file in model if weights or not file.endswith(".safetensors")]

    return _fetch(_list_model(address), ".whole" if weights else ".texts", choose)


def fetch_folder(address: str, key: str) -> Path:
    """Return the local folder with all files of an address; `key` is the recipe's name for it.

    Raises:
        RecipeError: it cannot be read, or nothing is there.
        StorageError: its storage is away.
    """
    listing = _list(address, key)
    if not listing.files:
        raise RecipeError(f"{key}: {address}: nothing is there")
    return _fetch(listing, ".whole", lambda listing: listing.files)


def _fetch(listing: _Listing, done: str, choose: Callable[[_Listing], list[str]]) -> Path:
    """Download the chosen files into the folder of the listing's identity, once per machine; `done` is the
    marker file."""
    from filelock import FileLock

    folder = caches.hub_folder(f"addresses/{listing.identity}")
    with FileLock(folder.with_suffix(".lock")):
        if (folder / done).exists() or (folder / ".whole").exists():
            return folder
        with _errors_translated(listing.storage.where):
            contents = Contents.parse(listing.storage.read(CONTENTS)) if CONTENTS in listing.files else None
            for file in choose(listing):
                listing.storage.download(file, folder / file)
                if contents is not None and file != CONTENTS:
                    _compare(contents, folder, file, listing.storage.where)
        (folder / done).touch()
    return folder


def _compare(contents: Contents, folder: Path, file: str, where: str) -> None:
    """Compare a downloaded file with the list of the artifact that it is part of; files that people added may
    not be used."""
    try:
        contents.check(file, (folder / file).stat().st_size, sha256_of(folder / file))
    except FileDiffers as error:
        (folder / file).unlink()
        raise RecipeError(f"{where}: {error}; restore the artifact, or publish it again") from None


def _list_model(address: str) -> _Listing:
    """Do as `_list`, for a model."""
    listing = _list(address, _MODEL)
    if not any(PurePosixPath(file).name == "config.json" for file in listing.files):
        names = ", ".join(sorted(listing.files)[:8]) or "nothing"
        raise RecipeError(f"{_MODEL}: {address}: no config.json there; it holds {names}")
    return listing


def _list(address: str, key: str) -> _Listing:
    with _errors_translated(f"{key}: {address}"):
        storage = Storage(address, key, failed="cannot be read", retry=False)
        files_there = storage.files()
    parts = [address.rstrip("/")]
    for file, info in sorted(files_there.items()):
        kept = next(
            (info[mark] for mark in ("ETag", "etag", "md5Hash", "crc32c", "mtime") if info.get(mark)), ""
        )
        parts.append(f"{storage.path(file)} {info.get('size')} {kept}")
    return _Listing(storage, list(files_there), hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16])


@contextmanager
def _errors_translated(where: str) -> Iterator[None]:
    """Raise a RecipeError for an address that is wrong or refused, and a StorageError that is retried for any
    other failure."""
    try:
        yield
    except FileNotFoundError as error:
        raise RecipeError(f"{where}: cannot be read: {error} does not exist") from error
    except RecordError as error:
        raise RecipeError(
            f"{where}: {CONTENTS}: {error}; restore the artifact, or publish it again"
        ) from None
    except StorageError as error:
        cause = error.__cause__
        is_unknown = isinstance(cause, ValueError) and "rotocol" in str(cause)
        if is_unknown or isinstance(cause, FileNotFoundError | PermissionError | ImportError):
            raise RecipeError(str(error)) from cause
        raise StorageError(str(error), goes_on=True) from cause
