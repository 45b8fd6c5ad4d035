"""A base model behind an fsspec address (s3://bucket/artifact): which files are needed, where they are fetched to."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

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
    from filelock import FileLock
    from huggingface_hub import constants

    filesystem, root, identity = _listed(address)
    folder = Path(constants.HF_HUB_CACHE) / "addresses" / identity
    done = folder / (".whole" if weights else ".texts")
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if done.exists() or (folder / ".whole").exists():
            return folder
        try:
            files = [str(file).removeprefix(root).strip("/") for file in filesystem.find(root)]
            index = filesystem.cat_file(f"{root}/{INDEX}") if INDEX in files else None
            for file in needed(files, index, code, f"model.name_or_path: {address}"):
                if weights or not file.endswith(".safetensors"):
                    filesystem.get_file(f"{root}/{file}", str(folder / file))
        except RecipeError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise _unread(address, error) from error
        done.touch()
    return folder


def _listed(address: str) -> tuple[Any, str, str]:
    """File system and root of an address, and 16 hex digits that change when what lies there does."""
    try:
        from fsspec.core import url_to_fs

        filesystem, root = url_to_fs(address.rstrip("/"))
        filesystem.invalidate_cache()
        found = filesystem.find(root, detail=True)
    except Exception as error:  # each file system has errors of its own
        raise _unread(address, error) from error
    parts = [address.rstrip("/")]
    for file, info in sorted(found.items()):
        kept = next((info[mark] for mark in ("ETag", "etag", "md5Hash", "crc32c", "mtime") if info.get(mark)), "")
        parts.append(f"{file} {info.get('size')} {kept}")
    if not any(file.endswith("/config.json") for file in found):
        names = ", ".join(sorted(str(file).removeprefix(root).strip("/") for file in found)[:8]) or "nothing"
        raise RecipeError(f"model.name_or_path: {address}: no config.json there; it holds {names}")
    return filesystem, root, hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _unread(address: str, error: Exception) -> RecipeError | StorageError:
    where = f"model.name_or_path: {address}: cannot be read"
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if isinstance(error, FileNotFoundError | PermissionError | ImportError) or (
        isinstance(error, ValueError) and "rotocol" in str(error)
    ):
        return RecipeError(f"{where}: {reason}")
    return StorageError(f"{where}: {reason}", goes_on=True)
