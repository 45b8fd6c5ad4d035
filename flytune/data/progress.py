"""How far preparing has come, kept beside the shards, so that a killed run continues behind the last whole ones."""

import hashlib
import logging
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flytune.data.shards import MANIFEST
from flytune.errors import DataError
from flytune.files import sha256_of, written_atomically
from flytune.recipe.recipe import DataRequest
from flytune.records.dataset import SplitCounts
from flytune.schema import Record, Strict

logger = logging.getLogger(__name__)
PROGRESS = "progress.json"
_FORM = "1"
"""Raise it when the same progress would go on to other bytes."""


class Place(Strict):
    """The next row of one source."""

    turn: int = 0
    """How often it was read whole; a weight above 1 reads it again."""
    chunk: int = 0
    row: int = 0
    """Rows with samples, of this chunk, that were taken."""
    is_done: bool = False


class Progress(Record):
    """progress.json: written when shards become whole; gone when the manifest is there."""

    request: str
    """A hash of what is prepared."""
    places: dict[str, Place]
    """By the recipe's key of the source."""
    tallies: dict[str, dict[str, Any]]
    train: SplitCounts
    heldout: SplitCounts
    bad_rows: int
    """Bytes of bad_rows.jsonl."""
    bad: int
    first_bad: list[str]


def digest_of(request: DataRequest) -> str:
    """64 hex digits: equal for requests that give equal bytes."""
    return hashlib.sha256(f"{_FORM}:{request.model_dump_json()}".encode()).hexdigest()


def save(progress: Progress, folder: Path) -> None:
    """In one step: a reader finds the old or the new one."""
    with written_atomically(folder / PROGRESS) as temporary:
        progress.write(temporary)


def find(folder: Path, request: DataRequest, keys: list[str]) -> Progress:
    """Where an earlier run of the same request came to in `folder`; the beginning, where there was none.

    Whatever is not part of it is removed, unless all of it was done. `keys` are the recipe's keys of all sources.

    Raises:
        DataError: the progress is that of another request.
    """
    begun = _read(folder)
    if begun is not None and begun.request != digest_of(request):
        raise DataError(f"{folder}: another preparation was begun there; prepared data needs a folder of its own")
    if begun is not None and (folder / MANIFEST).exists():
        return begun
    if begun is not None and (changed := _changed(folder, begun)):
        logger.warning("%s: %s is not what %s says; preparing begins anew", folder, changed, PROGRESS)
        begun = None
    if begun is None:
        none = SplitCounts(samples=0, tokens=0, trained_tokens=0, shards=[])
        begun = Progress(
            request=digest_of(request), places=dict.fromkeys(keys, Place()), tallies={}, train=none, heldout=none,
            bad_rows=0, bad=0, first_bad=[],
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        save(begun, folder)
    else:
        logger.info("%s: going on behind %d whole shards", folder, len(begun.train.shards) + len(begun.heldout.shards))
    whole = {shard.file for shard in (*begun.train.shards, *begun.heldout.shards)}
    for file in folder.glob("*/*.parquet"):
        if file.relative_to(folder).as_posix() not in whole:
            file.unlink()
    return begun


def _read(folder: Path) -> Progress | None:
    try:
        return Progress.read(folder / PROGRESS)
    except (OSError, ValidationError):
        return None


def _changed(folder: Path, begun: Progress) -> str:
    """The first shard that is not as it was written; none, as a rule."""
    for shard in (*begun.train.shards, *begun.heldout.shards):
        file = folder / shard.file
        if not file.is_file() or sha256_of(file) != shard.sha256:
            return shard.file
    return ""
