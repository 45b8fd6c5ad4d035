"""Decisions of earlier attempts, from their records: a smaller micro batch, and data to skip."""

import logging
from dataclasses import asdict, dataclass, field
from typing import Any

from flytune.errors import OutOfMemory, StorageError, TrainingError
from flytune.failures.table import OUT_OF_GPU_MEMORY
from flytune.records import Plan
from flytune.sentences import sharers
from flytune.training import earlier_attempts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Notes:
    """Decisions of earlier attempts."""

    per_device_train_batch_size: int | None = None
    """Largest micro batch size to use; None for the plan's."""
    left_out: list[int] = field(default_factory=list)
    """Skipped data, as in NodeAttempt."""
    rollbacks: int = 0

    def applied(self, plan: Plan) -> Plan:
        """Return the plan with the micro batch noted here, and the same global batch."""
        size = self.per_device_train_batch_size
        if size is None or size >= plan.per_device_train_batch_size:
            return plan
        smaller = plan.with_micro_batch(size) or plan
        micro, accumulation = smaller.per_device_train_batch_size, smaller.gradient_accumulation_steps
        log.warning(
            "an earlier attempt ran out of GPU memory: micro batch %d, %d accumulated", micro, accumulation
        )
        return smaller


def read(address: str, order: str = "", halves_on: str | None = None, is_required: bool = True) -> Notes:
    """Return what the attempts at an address decided for the next one, over data in an order.

    An attempt that ran out of GPU memory on the shape `halves_on` leaves half its micro batch; none does
    where it is None.

    Args:
        is_required: whether a storage that cannot be read ends the run; a run without checkpoints writes none
            there.

    Raises:
        TrainingError: a record is damaged.
        StorageError: the storage cannot be read.
    """
    try:
        records = earlier_attempts.stored(address, retry=is_required)
    except StorageError as error:
        if is_required:
            raise type(error)(f"{error}; the run does not start") from error
        log.warning("records of earlier attempts cannot be read: %s", error)
        return Notes()
    sizes: list[int] = []
    skipping = Notes()
    for record in records:
        half = record.per_device_train_batch_size // 2
        if (
            halves_on is not None
            and record.kind == OUT_OF_GPU_MEMORY
            and record.shape in ("", halves_on)
            and half > 0
        ):
            sizes.append(half)
        if record.left_out and record.order not in ("", order):
            log.warning(
                "data was skipped by an attempt with other data, or with another order of it; it is not "
                "skipped now"
            )
        elif record.rollbacks > skipping.rollbacks:
            # Each has what the ones before it have left out.
            skipping = Notes(left_out=record.left_out, rollbacks=record.rollbacks)
    return Notes(min(sizes, default=None), skipping.left_out, skipping.rollbacks)


def check_agreed(notes: Notes, args: Any) -> None:
    """Check that all processes have read the same notes. All call it, once there is a process group.

    Raises:
        TrainingError: the notes differ; processes would wait for each other for ever.
    """
    if args.world_size == 1:
        return
    import torch.distributed

    notes_of_all: list[Any] = [None] * args.world_size
    torch.distributed.all_gather_object(notes_of_all, asdict(notes))
    if any(other != notes_of_all[0] for other in notes_of_all):
        raise TrainingError(
            f"rank {args.process_index}: checkpoints.folder is not one folder that all nodes see: the "
            "records of earlier attempts differ between them; name a file system that is mounted into all "
            "pods; the run does not continue by itself"
        )


def out_of_memory(plan: Plan, rank: int, step: int, *, goes_on: bool, error: BaseException) -> OutOfMemory:
    """Return the error of a rank whose GPU is full, with the plan's next candidate.

    The next attempt takes it by itself if the run `goes_on`.
    """
    processes = sharers(plan.degrees.data_parallel, plan.degrees.copies)
    size, accumulation = plan.per_device_train_batch_size, plan.gradient_accumulation_steps
    seen = f"rank {rank}: out of GPU memory at step {step}, {size} x {accumulation} accumulated x {processes}"
    smaller = plan.halved()
    if smaller is None:
        return OutOfMemory(
            f"{seen}; the run does not continue by itself. No micro batch is smaller: lower data.max_length, "
            f"shard or offload more, or choose a larger shape: {error}"
        )
    half = smaller.per_device_train_batch_size
    layout = f"{half} x {smaller.gradient_accumulation_steps} x {processes}"
    same = f"{layout} is the same global batch of {plan.global_batch_size}"
    if goes_on:
        return OutOfMemory(f"{seen}; {same}, and the next attempt uses it: {error}", goes_on=True)
    return OutOfMemory(
        f"{seen}; the run does not continue by itself. {same}: set training.per_device_train_batch_size: "
        f"{half}, or training.auto_find_batch_size: true, which does so by itself: {error}"
    )
