"""Content of fsspec addresses (s3://bucket/artifact) on this machine: a base model's files, or a whole folder."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from flytune import caches
from flytune.errors import RecipeError, StorageError

INDEX = "model.safetensors.index.json"
TEXTS = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
"""Config and tokenizer; transformers looks for no other endings."""


def identity(address: str) -> str:
    """16 hex digits that change when what lies there does, as far as its storage keeps checksums or times.

    Raises:
        RecipeError: it cannot be read, or holds no model.
        StorageError: its storage is away.
    """
    return _listed(address)[2]


def needed(files: Iterable[str], index: bytes | None, code: bool, where: str) -> list[str]:
    """Of a model's files, those that loading it takes: config, tokenizer, and the weights that transformers chooses.

    Raises:
        RecipeError: there are no safetensors.
    """
    files = sorted(file for file in files if "/" not in file)
    texts = [file for file in files if PurePosixPath(file).suffix in TEXTS | ({".py"} if code else set())]
    weights = [file for file in files if file.endswith(".safetensors")]
    if "model.safetensors" in weights:
        weights = ["model.safetensors"]
    elif index is not None:
        # Mistral's repositories hold all weights once more, as consolidated.safetensors.
        weights = sorted(set(json.loads(index)["weight_map"].values()))
    if not weights:
        raise RecipeError(f"{where}: it has no *.safetensors, and no other weights are read; it holds {', '.join(files[:8])}")
    return texts + weights


def fetched(address: str, weights: bool, code: bool) -> Path:
    """The folder that the files behind an address lie in on this machine; another one once they have changed.

    Raises: as `identity`.
    """

    def wanted(filesystem: Any, root: str, files: list[str]) -> list[str]:
        index = filesystem.cat_file(f"{root}/{INDEX}") if INDEX in files else None
        model = needed(files, index, code, f"model.name_or_path: {address}")
        return [file for file in model if weights or not file.endswith(".safetensors")]

    return _fetched(address, _listed(address), ".whole" if weights else ".texts", wanted)


def folder(address: str, key: str) -> Path:
    """Return the folder that has all files of an address on this machine; `key` is the recipe's name for it.

    Raises:
        RecipeError: it cannot be read, or nothing is there.
        StorageError: its storage is away.
    """
    listed = _found(address, key)
    if not listed[3]:
        raise RecipeError(f"{key}: {address}: nothing is there")
    return _fetched(address, listed[:3], ".whole", lambda filesystem, root, files: files, key)


def _fetched(
    address: str, listed: tuple[Any, str, str], done: str, wanted: Callable[..., list[str]], key: str = "model.name_or_path"
) -> Path:
    from filelock import FileLock

    filesystem, root, identity = listed
    folder = caches.hub_folder(f"addresses/{identity}")
    with FileLock(folder.with_suffix(".lock")):
        if (folder / done).exists() or (folder / ".whole").exists():
            return folder
        try:
            files = [str(file).removeprefix(root).strip("/") for file in filesystem.find(root)]
            for file in wanted(filesystem, root, files):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                filesystem.get_file(f"{root}/{file}", str(folder / file))
        except RecipeError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise _unread(address, error, key) from error
        (folder / done).touch()
    return folder


def _listed(address: str) -> tuple[Any, str, str]:
    """Do as `_found`, for a model."""
    filesystem, root, identity, found = _found(address, "model.name_or_path")
    if not any(file.endswith("/config.json") for file in found):
        names = ", ".join(sorted(file.removeprefix(root).strip("/") for file in found)[:8]) or "nothing"
        raise RecipeError(f"model.name_or_path: {address}: no config.json there; it holds {names}")
    return filesystem, root, identity


def _found(address: str, key: str) -> tuple[Any, str, str, list[str]]:
    """Return file system and root of an address, 16 hex digits that change when its content does, and the files."""
    try:
        from fsspec.core import url_to_fs

        filesystem, root = url_to_fs(address.rstrip("/"))
        filesystem.invalidate_cache()
        found = filesystem.find(root, detail=True)
    except Exception as error:  # each file system has errors of its own
        raise _unread(address, error, key) from error
    parts = [address.rstrip("/")]
    for file, info in sorted(found.items()):
        kept = next((info[mark] for mark in ("ETag", "etag", "md5Hash", "crc32c", "mtime") if info.get(mark)), "")
        parts.append(f"{file} {info.get('size')} {kept}")
    return filesystem, root, hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16], list(map(str, found))


def _unread(address: str, error: Exception, key: str) -> RecipeError | StorageError:
    where = f"{key}: {address}: cannot be read"
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if isinstance(error, FileNotFoundError | PermissionError | ImportError) or (
        isinstance(error, ValueError) and "rotocol" in str(error)
    ):
        return RecipeError(f"{where}: {reason}")
    return StorageError(f"{where}: {reason}", goes_on=True)
