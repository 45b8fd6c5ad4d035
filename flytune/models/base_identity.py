"""Identity of a base model: a text that changes when its weights or its config.json do, without reading a
large model.

A model of the hub is identified by its commit; one at an address by what its storage keeps of each file
(checksum or time, and size). Of a folder, config.json, the index and the headers of all safetensors files are
read, and of the weights themselves all bytes up to WHOLE; of larger ones, the first and the last SAMPLE bytes
of up to TENSORS tensors of a file, spread evenly. Further training changes nearly all tensors, and is
noticed; a change of single numbers in a large model need not be.
"""

import functools
import hashlib
import math
from pathlib import Path
from typing import Any

from flytune import json_core
from flytune.errors import RecipeError
from flytune.files import CHUNK, FileRefusedError, open_regular
from flytune.models import base, remote, tensor_headers
from flytune.recipe import Model

WHOLE = 2**30
"""Bytes of all weights up to which each byte counts."""
SAMPLE = 4096
TENSORS = 4096
_TEXTS = ("config.json", remote.INDEX)


def identity_of(model: Model) -> str:
    """Return the identity; empty for a model of the hub whose commit is unknown.

    Raises:
        RecipeError: the folder or the address cannot be read.
        StorageError: the address's storage is away.
    """
    if base.is_address(model.name_or_path):
        return remote.identity(model.name_or_path)
    if base.is_on_hub(model):
        commit = base.commit_of(model)
        return f"{model.name_or_path}@{commit}" if commit else ""
    folder = Path(model.name_or_path).expanduser().resolve()
    files = sorted(
        path for path in folder.iterdir() if path.name in _TEXTS or path.suffix in _suffixes(model)
    )
    # Files that are replaced while the process lives are read again.
    return _digest(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files))


def _suffixes(model: Model) -> tuple[str, ...]:
    return (".safetensors", ".py") if model.trust_remote_code else (".safetensors",)


@functools.cache
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    digest = hashlib.sha256()
    weights = sum(size for path, size, _ in files if path.suffix == ".safetensors")
    for path, size, _ in files:
        digest.update(f"{path.name} {size}\n".encode())
        try:
            with open_regular(path) as content:
                if path.suffix == ".safetensors" and weights > WHOLE:
                    _add_sample(digest, content, str(path))
                else:
                    while chunk := content.read(CHUNK):
                        digest.update(chunk)
        except (OSError, FileRefusedError) as error:
            raise RecipeError(f"model.name_or_path: {path}: cannot be read: {error}") from None
    return digest.hexdigest()[:16]


def _add_sample(digest: Any, content: Any, where: str) -> None:
    """Add the header of a safetensors file, and both ends of its tensors."""
    first = content.read(8)
    length = tensor_headers.length_of(first, where)
    header = content.read(length)
    digest.update(first + header)
    try:
        described = json_core.load(header, length)
        offsets = [entry["data_offsets"] for name, entry in described.items() if name != "__metadata__"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise RecipeError(
            f"model.name_or_path: {where}: its header cannot be read: {error}; download it again"
        ) from None
    step = max(1, math.ceil(len(offsets) / TENSORS))
    for begin, end in sorted(offsets)[::step]:
        for place in (begin, max(begin, end - SAMPLE)):
            content.seek(8 + length + place)
            digest.update(content.read(min(SAMPLE, end - begin)))
