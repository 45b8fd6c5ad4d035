"""What one attempt leaves for the next beside its checkpoints: a smaller micro batch, and steps that are left out."""

import logging
from typing import Any

from pydantic import Field

from flytune.errors import OutOfMemory, TrainingError
from flytune.records.plan import Plan
from flytune.schema import Strict
from flytune.storage import Storage

log = logging.getLogger(__name__)

FILE = "notes.json"


class Notes(Strict):
    """The content of notes.json."""

    per_device_train_batch_size: int | None = None
    """Where the plan's did not fit."""
    left_out: list[int] = Field(default=[])
    """Steps' worth of data that is not trained, ascending; 0 is the first of the data's order."""
    rollbacks: int = 0
    """How often data was left out."""

    def applied(self, plan: Plan) -> Plan:
        """The plan with the micro batch noted here, and the same global batch."""
        size = self.per_device_train_batch_size
        if size is None or size >= plan.per_device_train_batch_size:
            return plan
        accumulation = plan.global_batch_size // plan.world_size // size
        log.warning("an earlier attempt ran out of GPU memory: micro batch %d, %d accumulated", size, accumulation)
        return plan.model_copy(update={"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation})


def read(place: str) -> Notes:
    """The notes at a folder or fsspec address; none yet are empty ones."""
    found = content(place, FILE)
    return Notes() if found is None else Notes.model_validate_json(found)


def write(place: str, notes: Notes) -> None:
    """Replace the notes; a reader sees the old ones or the new ones."""
    put(place, FILE, notes.model_dump_json(indent=2).encode())


def clear(place: str) -> None:
    """Delete the notes."""
    remove(place, FILE)


def names(place: str) -> list[str]:
    """List the names of the files directly in a folder or at an fsspec address; none if it does not exist."""
    return Storage(place, retry=False).names()


def content(place: str, name: str) -> bytes | None:
    """Return the content of a file there; None if it does not exist."""
    try:
        return Storage(place, retry=False).read(name)
    except FileNotFoundError:
        return None


def put(place: str, name: str, text: bytes) -> None:
    """Write or replace a file there; a reader sees the old content or the new content."""
    Storage(place, retry=False).write(name, text)


def remove(place: str, name: str) -> None:
    """Delete a file there, if it exists."""
    Storage(place, retry=False).remove(name)


def check_agreed(notes: Notes, args: Any) -> None:
    """Every process must have read the same; called by all, once there is a process group.

    Raises:
        TrainingError: they have not; they would wait for each other for ever.
    """
    if args.world_size == 1:
        return
    import torch.distributed

    found: list[Any] = [None] * args.world_size
    torch.distributed.all_gather_object(found, notes.model_dump())
    if any(other != found[0] for other in found):
        raise TrainingError(
            f"rank {args.process_index}: checkpoints.folder is not one folder that all nodes see: {FILE} differs between "
            "them; name a file system that is mounted into all pods; the run does not go on by itself"
        )


def smaller(place: str, kept: Notes, args: Any, step: int, *, is_noted: bool, error: BaseException) -> OutOfMemory:
    """What a rank raises whose GPU is full: the same global batch in smaller pieces, noted for the next attempt if wished."""
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    share = size * accumulation
    half = next((fewer for fewer in range(size // 2, 0, -1) if share % fewer == 0), None)
    laid_out = f"{size} x {accumulation} accumulated x {args.world_size} processes"
    seen = f"rank {args.process_index}: out of GPU memory at step {step}, {laid_out}"
    if half is None:
        return OutOfMemory(
            f"{seen}; the run does not go on by itself. No micro batch is smaller: lower data.max_length, shard or "
            f"offload more, or choose a larger shape: {error}"
        )
    same = f"{half} x {share // half} x {args.world_size} processes is the same global batch of {share * args.world_size}"
    if not is_noted:
        return OutOfMemory(
            f"{seen}; the run does not go on by itself. {same}: set training.per_device_train_batch_size: {half}, "
            f"or training.auto_find_batch_size: true, which does it by itself: {error}"
        )
    write(place, kept.model_copy(update={"per_device_train_batch_size": half}))
    return OutOfMemory(f"{seen}; {same}, and the next attempt takes it: {error}", goes_on=True)
