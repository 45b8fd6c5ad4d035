"""Data preparation on CPUs: the GPU never waits for a tokenizer."""

import logging
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from flytune import data
from flytune.data import Progress, digest_of
from flytune.data.bad_rows import BAD_ROWS
from flytune.data.progress import PROGRESS
from flytune.data.shards import MANIFEST
from flytune.errors import DataError
from flytune.recipe import DataRequest
from flytune.records import Manifest
from flytune.records.contents import seal
from flytune.stages.orchestrator import Folder, Orchestrator
from flytune.stages.table import PREPARED

logger = logging.getLogger(__name__)


def prepare_data(orchestrator: Orchestrator, request: DataRequest, scratch_folder: str) -> Folder:
    """Write tokenized parquet shards with a manifest; cached by the content of the data, not by its address.

    Finished shards stay below `scratch_folder` until all are done: a retry that shares the folder continues
    where a killed attempt stopped.
    """
    return _prepared(orchestrator, request, scratch_folder)


def prepare_for_training(orchestrator: Orchestrator, request: DataRequest, scratch_folder: str) -> Folder:
    """Do as prepare_data; the training that follows in the same terminal shows the contract's faults."""
    return _prepared(orchestrator, request, scratch_folder, trains_next=True)


def _prepared(
    orchestrator: Orchestrator, request: DataRequest, scratch_folder: str, trains_next: bool = False
) -> Folder:
    folder = orchestrator.new_folder() / "dataset"
    work = Path(scratch_folder) / f"preparing-{PREPARED}-{digest_of(request)[:16]}"
    lock = FileLock(work.with_suffix(".lock"))
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except (
        OSError,
        Timeout,
    ) as error:  # no such mount in this pod, or another task prepares the same data now
        logger.warning("%s: %s; a retry of this attempt would start again", scratch_folder, error)
        data.prepare(request, folder, trains_next=trains_next)
        return _listed(folder)
    try:
        if not (work / MANIFEST).exists() or (work / PROGRESS).exists():
            data.prepare(request, work, trains_next=trains_next)
        shutil.move(work, folder)
    except DataError as error:
        if not (work / PROGRESS).exists() or len(Progress.read(work / PROGRESS).train.shards) >= 2:
            raise
        listed = work.with_suffix(".bad_rows.jsonl")
        if (work / BAD_ROWS).exists():
            shutil.copy(work / BAD_ROWS, listed)
        shutil.rmtree(work)  # quickly made again
        raise DataError(str(error).replace(str(work / BAD_ROWS), str(listed))) from None
    finally:
        Path(lock.lock_file).unlink()
        lock.release()
    return _listed(folder)


def _listed(folder: Path) -> Folder:
    """Return a data set with the list of its files; the shards' hashes are known."""
    manifest = Manifest.read(folder / MANIFEST)
    shards = [*manifest.train.shards, *manifest.heldout.shards]
    seal(folder, "dataset", {shard.file: shard.sha256 for shard in shards})
    return Folder.here(folder)
