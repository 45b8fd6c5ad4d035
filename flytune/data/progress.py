"""The progress of a preparation, stored with the shards, so that a killed run resumes after the last complete
ones."""

import hashlib
import logging
from pathlib import Path

from flytune.data.counts import Tally
from flytune.data.shards import MANIFEST
from flytune.errors import DataError
from flytune.files import sha256_of, written_atomically
from flytune.recipe import DataRequest
from flytune.records import SplitCounts
from flytune.schema import Record, RecordError, Strict, omitted

logger = logging.getLogger(__name__)
PROGRESS = "progress.json"
_FORMAT = "2"
"""Version of the preparation. Raise it when resuming from the same progress would give other bytes."""


class Position(Strict):
    """The position in one source after the last stored row."""

    turn: int = 0
    """Number of complete passes; a weight above 1 reads the source again."""
    chunk: int = 0
    row: int = 0
    """Number of rows with samples that were taken from this chunk."""
    is_done: bool = False


class Progress(Record):
    """progress.json: written when shards are complete, deleted after the manifest is written."""

    request: str
    """Hash of the request."""
    places: dict[str, Position]
    """Positions by the recipe's keys of the sources."""
    tallies: dict[str, Tally]
    """Counts by the same keys; empty until the first shards are complete."""
    train: SplitCounts
    heldout: SplitCounts
    heldout_below: int | None = omitted(None)
    """Number below which rows are held out (Sampler), once data.heldout_fraction has left a split without
    any."""
    bad_rows: int
    """Bytes of bad_rows.jsonl."""
    bad: int
    first_bad: list[str]


def digest_of(request: DataRequest) -> str:
    """Return 64 hex digits that are equal for requests that give equal bytes."""
    return hashlib.sha256(f"{_FORMAT}:{request.model_dump_json()}".encode()).hexdigest()


def save(progress: Progress, folder: Path) -> None:
    """Write progress.json atomically: a reader finds the old or the new one."""
    with written_atomically(folder / PROGRESS) as temporary:
        progress.write(temporary)


def start(folder: Path, request: DataRequest, keys: list[str], heldout_below: int | None = None) -> Progress:
    """Write and return the progress of a preparation that begins; `keys` are the recipe's keys of all
    sources."""
    none = SplitCounts(samples=0, tokens=0, trained_tokens=0, shards=[])
    begun = Progress(
        request=digest_of(request),
        places=dict.fromkeys(keys, Position()),
        tallies={},
        train=none,
        heldout=none,
        heldout_below=heldout_below,
        bad_rows=0,
        bad=0,
        first_bad=[],
    )
    folder.mkdir(parents=True, exist_ok=True)
    save(begun, folder)
    return begun


def find(folder: Path, request: DataRequest, keys: list[str]) -> Progress:
    """Return the progress of an earlier run of the same request in `folder`; a new one if there was none.

    Shards that are not part of it are deleted, unless the preparation is complete. `keys` are the recipe's
    keys of all sources.

    Raises:
        DataError: the folder has the progress of another request.
    """
    existing = _read(folder)
    if existing is not None and existing.request != digest_of(request):
        raise DataError(
            f"{folder}: has the progress of another preparation; prepared data needs a folder of its own"
        )
    if existing is not None and (folder / MANIFEST).exists():
        return existing
    if existing is not None and (changed := _changed(folder, existing)):
        logger.warning("%s: %s does not match %s; the preparation starts again", folder, changed, PROGRESS)
        existing = None
    if existing is None:
        existing = start(folder, request, keys)
    else:
        logger.info(
            "%s: resuming after %d complete shards",
            folder,
            len(existing.train.shards) + len(existing.heldout.shards),
        )
    complete = {shard.file for shard in (*existing.train.shards, *existing.heldout.shards)}
    for file in folder.glob("*/*.parquet"):
        if file.relative_to(folder).as_posix() not in complete:
            file.unlink()
    return existing


def _read(folder: Path) -> Progress | None:
    try:
        return Progress.read(folder / PROGRESS)
    except (OSError, RecordError):
        return None


def _changed(folder: Path, existing: Progress) -> str:
    """Return the file name of the first shard that has changed or is missing; "" if none has."""
    for shard in (*existing.train.shards, *existing.heldout.shards):
        file = folder / shard.file
        if not file.is_file() or sha256_of(file) != shard.sha256:
            return shard.file
    return ""
