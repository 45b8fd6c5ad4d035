"""Which checkpoint a run goes on from: the newest whole one, the same on every process."""

import logging
from pathlib import Path
from typing import Any

from flytune.errors import TrainingError

log = logging.getLogger(__name__)


def agreed(checkpoint: Path | None, args: Any) -> Path | None:
    """The checkpoint that every process has found.

    Raises:
        TrainingError: they found different ones; each would train another run, and all would wait for each other.
    """
    if args.world_size == 1:
        return checkpoint
    import torch.distributed

    found: list[str | None] = [None] * args.world_size
    torch.distributed.all_gather_object(found, checkpoint and checkpoint.name)
    if len(set(found)) > 1:
        raise TrainingError(
            f"rank {args.process_index}: checkpoints.folder is not one folder that all nodes see: the newest whole checkpoint "
            f"is {', '.join(f'{name or None} on rank {rank}' for rank, name in enumerate(found))}; name a file system that is "
            "mounted into all pods; the run does not go on by itself"
        )
    return checkpoint


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end (trainer_state.json comes last), if any."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    last = max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    if last:
        log.info("going on from %s", last)
    return last


def check_size(checkpoint: Path, world_size: int) -> None:
    """Refuses a checkpoint of another number of processes, for shardings that cannot lay it out anew.

    Raises:
        TrainingError: how many wrote it, and what to do.
    """
    # The Trainer saves the random state of each process.
    written = len(list(checkpoint.glob("rng_state_*.pth"))) or 1
    if written != world_size:
        raise TrainingError(
            f"{checkpoint}: written by {written} processes, and this run has {world_size}; DeepSpeed cannot lay the states "
            f"that it partitions out anew, and the run does not go on. Choose a shape of {written} processes, or remove "
            f"{checkpoint.parent} to start over"
        )
