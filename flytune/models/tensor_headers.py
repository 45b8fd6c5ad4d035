"""Names, dtypes and shapes of a model's tensors from the headers of its safetensors files, without torch and
without weights.

A file begins with 8 bytes, the length of a JSON object that describes each tensor (safetensors' own
documentation, "Format").
"""

import logging
from pathlib import Path

from flytune import json_core
from flytune.errors import RecipeError
from flytune.files import read_regular
from flytune.models import base, weight_index
from flytune.models.weight_index import INDEX
from flytune.recipe import Model
from flytune.sentences import counted
from flytune.storage import Storage
from training_estimates.tensor_counts import Tensor

log = logging.getLogger(__name__)

LARGEST = 100_000_000
"""Bytes of a header at most, safetensors' own limit."""
SINGLE = "model.safetensors"
_KEY = "model.name_or_path"


def read(model: Model) -> dict[str, Tensor] | None:
    """Return the tensors of a model by name; None if no safetensors are at hand (none there, or the hub does
    not answer).

    Raises:
        RecipeError: a file is missing, truncated, or no safetensors file; the hub refuses the model.
        StorageError: the address's storage is away.
    """
    name = model.name_or_path
    if base.is_address(name):
        return _at_address(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _in_folder(folder)
    return _on_hub(model)


def absence(folder: Path) -> str:
    """Return what a folder has in place of safetensors files; empty if it has one, or an index of some."""
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return ""
    others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    entries = (
        f"only {', '.join(others[:3])}, which must be converted first (save_pretrained)"
        if others
        else "no weights"
    )
    return f"has neither {SINGLE} nor {INDEX}; found {entries}"


def _in_folder(folder: Path) -> dict[str, Tensor] | None:
    if (folder / SINGLE).is_file():
        return _parse_file(folder / SINGLE)
    if not (folder / INDEX).is_file():
        return None
    try:
        files = _files_of(read_regular(folder / INDEX, json_core.LARGEST), f"{folder / INDEX}")
    except OSError as error:
        raise RecipeError(f"{_KEY}: {folder / INDEX}: cannot be read: {error.strerror}") from None
    missing = [file for file in files if not (folder / file).is_file()]
    if len(missing) == len(files):
        return None  # config and tokenizer alone
    if missing:
        raise RecipeError(
            f"{_KEY}: {folder}: {len(missing)} of {counted(len(files), 'file')} of {INDEX} are missing: "
            f"{missing[0]}"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _parse_file(folder / file)
    return tensors


def _parse_file(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            length = length_of(file.read(8), str(path))
            return _parse(file.read(length), length, str(path), path.stat().st_size)
    except OSError as error:
        raise RecipeError(f"{_KEY}: {path}: cannot be read: {error.strerror}") from None


def _at_address(address: str) -> dict[str, Tensor] | None:
    storage = Storage(address, _KEY, failed="cannot be read", retry=False)
    try:
        names = storage.names()
        if SINGLE in names:
            files = [SINGLE]
        elif INDEX in names:
            files = _files_of(storage.read(INDEX), f"{address}/{INDEX}")
        else:
            return None
        tensors: dict[str, Tensor] = {}
        for file in files:
            where, size = f"{address}/{file}", storage.info(file)["size"]
            length = length_of(storage.read_part(file, 0, 8), where)
            tensors |= _parse(storage.read_part(file, 8, 8 + length), length, where, size)
    except FileNotFoundError as error:
        raise RecipeError(f"{_KEY}: {address}: cannot be read: {error} does not exist") from None
    return tensors


def _on_hub(model: Model) -> dict[str, Tensor] | None:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    name = model.name_or_path
    for file in (SINGLE, INDEX):
        cached = try_to_load_from_cache(name, file, revision=model.revision)
        if isinstance(cached, str):
            try:
                if (tensors := _in_folder(Path(cached).parent)) is not None:
                    return tensors
            except RecipeError as error:
                log.info("%s: not all of its files are in the hub's cache: %s", name, error)
    if not base.hub_answers():
        return None
    try:
        described = HfApi().get_safetensors_metadata(name, revision=model.revision)
    except NotASafetensorsRepoError:
        return None
    except SafetensorsParsingError as error:
        raise RecipeError(f"{_KEY}: {name}: {' '.join(str(error).split())[:300]}") from None
    except Exception as error:  # noqa: BLE001 (the hub's errors are OSErrors; those of a proxy are not)
        raise base.refused(error, f"{_KEY}: {name}") from None
    return {
        tensor: Tensor(info.dtype, tuple(info.shape))
        for file in described.files_metadata.values()
        for tensor, info in file.tensors.items()
    }


def length_of(first: bytes, where: str) -> int:
    """Return the bytes of a header, which the first 8 bytes of its file say.

    Raises:
        RecipeError: they say no possible length.
    """
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= LARGEST:
        raise RecipeError(
            f"{_KEY}: {where}: truncated, or not a safetensors file; download or export the model again"
        )
    return length


def _parse(header: bytes, length: int, where: str, size: int) -> dict[str, Tensor]:
    """Return the tensors of a header of `length` bytes, of a file of `size` bytes."""
    again = "download or export the model again"
    if len(header) < length:
        raise RecipeError(f"{_KEY}: {where}: truncated in its header; {again}")
    try:
        content = json_core.load(header, LARGEST)
        tensors, end = {}, 0
        for name, entry in content.items():
            if name == "__metadata__":
                continue
            shape = tuple(entry["shape"])
            if not all(type(width) is int and 0 <= width < 2**48 for width in shape) or not isinstance(
                entry["dtype"], str
            ):
                raise ValueError(f"the shape or dtype of {name:.80} is none")
            tensors[name] = Tensor(entry["dtype"], shape)
            end = max(end, int(entry["data_offsets"][1]))
    except (
        json_core.JSONError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OverflowError,
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RecipeError(f"{_KEY}: {where}: not a safetensors file ({reason:.200}); {again}") from None
    if 8 + length + end > size:
        raise RecipeError(f"{_KEY}: {where}: truncated: {size:,} of {8 + length + end:,} bytes; {again}")
    return tensors


def _files_of(index: bytes, where: str) -> list[str]:
    """Return the names of files in an index, sorted."""
    try:
        return sorted(set(weight_index.weight_map(index).values()))
    except weight_index.IndexRefused as error:
        raise RecipeError(f"{_KEY}: {where}: not an index of safetensors files ({error!s:.200})") from None
