"""Folders of `datasets.save_to_disk`: their rows, of no file but their own."""

from collections.abc import Iterator
from typing import Any

from flytune import json_core, names
from flytune.errors import DataError
from flytune.storage import Storage

_LARGEST_STATE = 10_000_000
"""Bytes of state.json and dataset_dict.json."""


def rows(path: str, split: str, key: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a saved data set, or of a split of several, with their places; `key` is the recipe's
    name for it.

    Raises:
        DataError: it is damaged, has no such split, or names files elsewhere.
    """
    import datasets

    _check_names(path, key)
    try:
        saved = datasets.load_from_disk(path)
    except Exception as error:  # an incomplete folder raises errors of Arrow or JSON, or a KeyError
        raise DataError(
            f"{path}: looks like datasets.save_to_disk but cannot be read: {type(error).__name__}: {error}"
        ) from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise DataError(f"{path}: no split {split}; set data.dataset_split to one of {', '.join(saved)}")
        saved = saved[split]
    saved = saved.with_format(None)  # it may have been saved with one, as tensors or with columns left out
    leave_encoded(saved.info.features)
    number = 0
    try:
        saved.data.table.validate(full=True)  # wrong offsets would end the process
        for number, row in enumerate(saved, 1):
            yield row, f"{path}, row {number}"
    except Exception as error:  # as above
        raise DataError(
            f"{path}: a damaged data set: {' '.join(str(error).split())} (after row {number})"
        ) from error


def _check_names(path: str, key: str) -> None:
    """Refuse a folder whose records name files elsewhere: datasets would read them."""
    storage = Storage(path, key, error=DataError, failed="cannot be read", retry=False)
    try:
        splits = [
            f"{names.check(str(one))}/" for one in _record(storage, "dataset_dict.json").get("splits", [])
        ]
        for folder in splits or [""]:
            state = _record(storage, f"{folder}state.json")
            for field in ("_data_files", "_indices_data_files"):
                for file in state.get(field) or []:
                    names.check(file["filename"])
    except names.NameRefused as error:
        raise DataError(f"{path}: names a file that is not in it: {error}") from None
    except (json_core.JSONError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: looks like datasets.save_to_disk but cannot be read: {error}") from None


def _record(storage: Storage, name: str) -> dict[str, Any]:
    try:
        return json_core.load_object(storage.read(name, largest=_LARGEST_STATE))
    except FileNotFoundError:  # datasets says what is missing
        return {}


def leave_encoded(feature: Any) -> None:
    """Keep images and sounds of rows as they are stored: decoding one opens the path or the address that a
    row names.

    JSON is text there, and is parsed.
    """
    if isinstance(feature, dict):
        for part in feature.values():
            leave_encoded(part)
    elif isinstance(feature, list | tuple):
        for part in feature:
            leave_encoded(part)
    elif (inner := getattr(feature, "feature", None)) is not None:
        leave_encoded(inner)
    elif getattr(feature, "decode", None) is True and type(feature).__name__ != "Json":
        feature.decode = False
