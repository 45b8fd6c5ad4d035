"""Notes of one attempt for the next, stored with the checkpoints: a smaller micro batch, and skipped steps."""

import logging
from typing import Annotated, Any, Self

from pydantic import Field

from flytune import files, limits
from flytune.errors import OutOfMemory, TrainingError
from flytune.records import Plan
from flytune.records.plan import halved
from flytune.schema import Positive, RecordError, Strict
from flytune.sentences import counted
from flytune.storage import Storage
from training_estimates.degrees import Degrees

log = logging.getLogger(__name__)

FILE = "notes.json"
_Number = Annotated[int, Field(ge=0, le=limits.COUNT)]


class Notes(Strict):
    """Content of notes.json."""

    per_device_train_batch_size: Positive | None = None
    """Micro batch size to use where the plan's does not fit."""
    left_out: list[_Number] = Field(default=[])
    """Skipped data, in units of one step's samples, ascending; 0 is the first step's in the data's order."""
    rollbacks: _Number = 0
    """Number of times that data was skipped."""
    order: Annotated[str, Field(exclude_if=lambda order: not order)] = ""
    """Key of the data and its order, of which `left_out` has positions; empty in notes of earlier releases."""

    def of_order(self, order: str) -> Self:
        """Return the notes for a run over data in an order: of another one, no position is skipped."""
        if self.left_out and self.order not in ("", order):
            log.warning("data was skipped by an attempt with other data, or with another order of it; nothing is skipped now")
            return self.model_copy(update={"left_out": [], "rollbacks": 0, "order": order})
        return self.model_copy(update={"order": order})

    def applied(self, plan: Plan) -> Plan:
        """Return the plan with the micro batch noted here, and the same global batch."""
        size = self.per_device_train_batch_size
        if size is None or size >= plan.per_device_train_batch_size:
            return plan
        share = plan.degrees.samples(plan.global_batch_size)
        size = next(fewer for fewer in range(size, 0, -1) if share % fewer == 0)
        accumulation = plan.degrees.accumulation(plan.global_batch_size, size)
        log.warning("an earlier attempt ran out of GPU memory: micro batch %d, %d accumulated", size, accumulation)
        return plan.model_copy(update={"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation})


def read(address: str) -> Notes:
    """Return the notes at a folder or fsspec address; empty ones where there are none.

    Raises:
        TrainingError: they are damaged.
    """
    found = content(address, FILE)
    try:
        return Notes() if found is None else Notes.parse(found)
    except RecordError as error:
        raise TrainingError(
            f"{address}/{FILE}: not the notes of an earlier attempt: {error}; restore the file, or delete it: then data that "
            "was skipped is read again"
        ) from None


def write(address: str, notes: Notes) -> None:
    """Replace the notes; a reader sees the old ones or the new ones."""
    put(address, FILE, notes.model_dump_json(indent=2).encode())


def clear(address: str) -> None:
    """Delete the notes."""
    remove(address, FILE)


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


def sweep(place: str) -> None:
    """Delete the files directly in a folder that attempts left which were killed while they wrote them."""
    for name in filter(files.is_temporary, names(place)):
        remove(place, name)


def check_agreed(notes: Notes, args: Any) -> None:
    """Check that all processes have read the same notes. All call it, once there is a process group.

    Raises:
        TrainingError: the notes differ; processes would wait for each other for ever.
    """
    if args.world_size == 1:
        return
    import torch.distributed

    found: list[Any] = [None] * args.world_size
    torch.distributed.all_gather_object(found, notes.model_dump())
    if any(other != found[0] for other in found):
        raise TrainingError(
            f"rank {args.process_index}: checkpoints.folder is not one folder that all nodes see: {FILE} differs between "
            "them; name a file system that is mounted into all pods; the run does not continue by itself"
        )


def out_of_memory(
    address: str, notes: Notes, args: Any, degrees: Degrees, step: int, *, is_noted: bool, error: BaseException
) -> OutOfMemory:
    """Return the error of a rank whose GPU is full, with the largest smaller micro batch of the same global batch.

    Args:
        is_noted: note that micro batch for the next attempt.
    """
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    share, half = size * accumulation, halved(size, accumulation)
    processes = counted(degrees.data_parallel, "process", "processes")
    layout = f"{size} x {accumulation} accumulated x {processes}"
    seen = f"rank {args.process_index}: out of GPU memory at step {step}, {layout}"
    if half is None:
        return OutOfMemory(
            f"{seen}; the run does not continue by itself. No micro batch is smaller: lower data.max_length, shard or "
            f"offload more, or choose a larger shape: {error}"
        )
    same = f"{half} x {share // half} x {processes} is the same global batch of {degrees.batch(size, accumulation)}"
    if not is_noted:
        return OutOfMemory(
            f"{seen}; the run does not continue by itself. {same}: set training.per_device_train_batch_size: {half}, "
            f"or training.auto_find_batch_size: true, which does so by itself: {error}"
        )
    write(address, notes.model_copy(update={"per_device_train_batch_size": half}))
    return OutOfMemory(f"{seen}; {same}, and the next attempt uses it: {error}", goes_on=True)
