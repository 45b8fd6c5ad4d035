"""Which checkpoint a run goes on from: the newest whole one, the same on every process."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flytune import __version__
from flytune.errors import StorageError, TrainingError
from flytune.training.checkpoints.ledger import Checkpoint, Ledger

log = logging.getLogger(__name__)
_T = TypeVar("_T")

PAUSE = 2.0
"""Seconds between looks at a folder that another attempt may be writing into."""


def gathered(value: _T, args: Any) -> list[_T]:
    """What each process has, by rank. All call it."""
    if args.world_size == 1:
        return [value]
    import torch.distributed

    found: list[Any] = [None] * args.world_size
    torch.distributed.all_gather_object(found, value)
    return found


def newest_whole(ledger: Ledger, args: Any, into: Path, check: Callable[[Checkpoint], None]) -> tuple[Checkpoint, Path] | None:
    """The newest checkpoint that is whole, if any, and the folder it can be read from: all processes get the same.

    Each process reads a share of the files. An address's are fetched into `into`, by each node; a folder's get names there:
    an earlier attempt that still lives may let this checkpoint go for a newer one, while it is being gone on from.

    Args:
        check: raises for a checkpoint that cannot be gone on from; asked before anything large is read.

    Raises:
        TrainingError: processes see other checkpoints; each would train another run, and all would wait for each other.
        StorageError: the storage is away, or refuses.
    """
    for _ in range(2):
        found = _seen_by_all(ledger, args)
        for checkpoint in found:
            check(checkpoint)
            if not (reason := _fault(ledger, args, checkpoint, into)):
                log.info("going on from step %d: %s/%s", checkpoint.step, ledger.storage.address, checkpoint.folder)
                return checkpoint, into / checkpoint.folder
            log.warning("%s/%s is not whole: %s; looking at the one before", ledger.storage.address, checkpoint.folder, reason)
        if not found:
            return None
        # Another attempt may have let these go for newer ones meanwhile.
        time.sleep(PAUSE)
    log.warning("%s: no checkpoint is whole; the run starts over", ledger.storage.address)
    return None


def _seen_by_all(ledger: Ledger, args: Any) -> list[Checkpoint]:
    for look in range(3):
        mine, problem = told(ledger.checkpoints)
        looks = gathered((tuple(checkpoint.folder for checkpoint in mine or []), problem), args)
        _raise_first([problem for _, problem in looks])
        seen = [folders for folders, _ in looks]
        if len(set(seen)) == 1:
            return mine or []
        if look < 2:
            time.sleep(PAUSE)
    newest = [folders[0] if folders else None for folders in seen]
    raise TrainingError(
        f"rank {args.process_index}: checkpoints.folder is not one folder that all nodes see: the newest checkpoint is "
        f"{', '.join(f'{name} on rank {rank}' for rank, name in enumerate(newest))}; name a file system that is mounted into "
        "all pods, or an address (s3://...); the run does not go on by itself"
    )


def told(look: Callable[[], _T]) -> tuple[_T | None, str | None]:
    """What `look` returns, or its StorageError's message: for peers that would wait for a process that raises."""
    try:
        return look(), None
    except StorageError as error:
        return None, str(error)


def _raise_first(problems: list[str | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise StorageError(f"rank {rank}: {problem}; the run does not start: it may have checkpoints there")


def _fault(ledger: Ledger, args: Any, checkpoint: Checkpoint, into: Path) -> str | None:
    """What any process has found wrong in its share of the files."""
    if ledger.storage.is_local:
        if args.local_process_index == 0:
            ledger.link(checkpoint, into / checkpoint.folder)
        # What was linked is what is looked at: files are never written twice.
        reason, problem = told(lambda: ledger.fault(checkpoint, share=slice(args.process_index, None, args.world_size)))
    else:
        local = slice(args.local_process_index, None, local_processes(args))
        reason, problem = told(lambda: ledger.fault(checkpoint, into / checkpoint.folder, local))
    all_found = gathered((reason, problem), args)
    _raise_first([problem for _, problem in all_found])
    return next((reason for reason, _ in all_found if reason), None)


def local_processes(args: Any) -> int:
    """Processes of this node."""

    return int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))


def check(checkpoint: Checkpoint, decisions: str, sharding: str, world_size: int, resizes: bool) -> None:
    """Refuses a checkpoint that this run's sharding cannot read; warns where its meaning may have changed.

    Args:
        resizes: whether the sharding can lay a checkpoint of another number of processes out anew.

    Raises:
        TrainingError: who wrote it, and what to do.
    """
    where = f"the checkpoint of step {checkpoint.step}"
    if checkpoint.sharding != sharding:
        raise TrainingError(
            f"{where}: written under sharding {checkpoint.sharding}, and this run has {sharding}, which does not read it; the "
            "run does not go on. Choose the same sharding, or another checkpoints.name to start over"
        )
    if checkpoint.world_size != world_size and not resizes:
        raise TrainingError(
            f"{where}: written by {checkpoint.world_size} processes, and this run has {world_size}; DeepSpeed cannot lay the "
            f"states that it partitions out anew, and the run does not go on. Choose a shape of {checkpoint.world_size} "
            "processes, or another checkpoints.name to start over"
        )
    if checkpoint.decisions != decisions:
        log.warning(
            "%s: written with another recipe or other data of the same checkpoints.name; going on with this one's", where
        )
    if checkpoint.flytune != __version__:
        log.warning("%s: written by flytune %s, this is %s", where, checkpoint.flytune, __version__)
