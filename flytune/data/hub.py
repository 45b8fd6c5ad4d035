"""Data sets on the Hugging Face hub: their commits and rows, and advice on the hub's errors."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flytune.errors import DataError, chain
from flytune.recipe import Source


def resolved_revision(name: str, revision: str | None, key: str) -> str:
    """Return the current commit of `revision` (of the main branch when None) of a data set. `key` is the
    recipe's section.

    A commit is returned without a request. Where the hub cannot be reached, a given revision is returned
    unchecked.

    Raises:
        DataError: there is no such data set, access is denied, or the hub cannot be reached and no revision
            is given.
    """
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    _refuse_folder(name, key)
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(name, revision=revision).sha)
    except Exception as error:  # HTTP errors, offline mode, bad names: advice() tells them apart
        if revision is not None and _is_unreachable(error):
            return revision
        pin = (
            f"; or set {key}.revision, if the data set is in the cache of this machine"
            if _is_unreachable(error)
            else ""
        )
        raise DataError(f"{key}.dataset_name: {name}: {advice(error, 'data set')}{pin}") from error


def hub_rows(
    source: Source, name: str, key: str = "data", split: str | None = None
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a data set on the hub, streamed; offline, and of a part of a split, from the cache of
    this machine.

    `split` is read instead of the source's own if it is given.

    Raises:
        DataError: the data set, its config, split or revision does not exist, access is denied, or the stream
            fails.
    """
    _refuse_folder(name, key)
    import datasets

    split = split or source.dataset_split
    place = f"{name}[{split}]"
    try:
        rows = datasets.load_dataset(
            name,
            source.dataset_config,
            split=split,
            revision=source.revision,
            # A part of a split (train[:10%]) or a sum (train+test) is read of the downloaded data set alone.
            streaming=not datasets.config.HF_HUB_OFFLINE and not {"[", "+"} & {*split},
        )
        for number, row in enumerate(rows, 1):
            yield dict(row), f"{place}, row {number}"
    except Exception as error:  # as above; the caller's own errors are not raised in here
        raise DataError(f"{key}.dataset_name: {place}: {advice(error, 'data set')}") from error


def advice(error: Exception, what: str) -> str:
    """Return a sentence on the reason why the hub did not provide `what`, and on what to do about it."""
    links = list(chain(error))
    names = {type(link).__name__ for link in links}
    text = " ".join(str(link) for link in links).lower()
    if "GatedRepoError" in names or "is a gated dataset" in text:
        token = (
            "the account of HF_TOKEN has no access yet"
            if os.environ.get("HF_TOKEN")
            else "HF_TOKEN is not set"
        )
        return f"gated on the hub, and {token}; request access on its page, then set HF_TOKEN"
    if "RevisionNotFoundError" in names:
        return f"the {what} has no such revision on the hub"
    if _is_unreachable(error):
        reason = (
            "HF_HUB_OFFLINE is set"
            if os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "ON", "YES", "TRUE"}
            else "no network?"
        )
        return f"not on this machine, and the hub cannot be reached ({reason})"
    if names & {"RepositoryNotFoundError", "DatasetNotFoundError", "HFValidationError"}:
        return f"no such {what} on the hub; if it is private, set HF_TOKEN"
    return f"cannot be read: {' '.join(str(error).split())[:300]}"


def _is_unreachable(error: Exception) -> bool:
    unreachable = {"OfflineModeIsEnabled", "LocalEntryNotFoundError"}
    return any(
        type(link).__name__ in unreachable
        or isinstance(link, ConnectionError)
        or "ConnectError" in type(link).__name__
        for link in chain(error)
    )


def _refuse_folder(name: str, key: str) -> None:
    if Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or "://" in name:
        raise DataError(
            f"{key}.dataset_name: {name}: this names a data set on the hub; for a file, folder or address "
            f"use {key}.path"
        )
