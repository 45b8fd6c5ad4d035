"""Choice of the checkpoint that a run resumes from: the newest complete one, the same on every process."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flytune import __version__
from flytune.errors import StorageError, TrainingError
from flytune.sentences import counted
from flytune.training.checkpoints import changes
from flytune.training.checkpoints.ledger import Checkpoint, Ledger, by_loss
from training_estimates.degrees import Degrees

log = logging.getLogger(__name__)
_T = TypeVar("_T")

PAUSE = 2.0
"""Seconds between looks at a folder that another attempt may be writing into."""


def gathered(value: _T, args: Any) -> list[_T]:
    """Return the value of each process, by rank. All processes call it."""
    if args.world_size == 1:
        return [value]
    import torch.distributed

    values: list[Any] = [None] * args.world_size
    torch.distributed.all_gather_object(values, value)
    return values


def newest_complete(
    ledger: Ledger, args: Any, into: Path, check: Callable[[Checkpoint], None]
) -> tuple[Checkpoint, Path] | None:
    """Return the newest complete checkpoint, if any, and the folder to read it from: all processes get the
    same.

    Each process reads a share of the files. Each node fetches an address's files into `into`; a folder's
    files are linked there, as an earlier attempt that still runs may delete this checkpoint for a newer one
    while it is being read.

    Args:
        check: raises for a checkpoint that this run cannot resume from; called before anything large is read.

    Raises:
        TrainingError: processes see different checkpoints; each would train another run, and all would wait
            for each other.
        StorageError: the storage is unavailable, or denies access.
    """
    for _ in range(2):
        seen = _seen_by_all(ledger, args)
        for checkpoint in seen:
            check(checkpoint)
            where = f"{ledger.storage.address}/{checkpoint.folder}"
            fault = _fault(ledger, args, checkpoint, into)
            if fault is None:
                log.info("resuming from step %d: %s", checkpoint.step, where)
                return checkpoint, into / checkpoint.folder
            log.warning("%s is not complete: %s; trying the one before", where, fault)
        if not seen:
            return None
        # Another attempt may have deleted these for newer ones meanwhile.
        time.sleep(PAUSE)
    log.warning("%s: no checkpoint is complete; the run starts from the beginning", ledger.storage.address)
    return None


def lowest_loss(
    ledger: Ledger, args: Any, into: Path, like: Checkpoint, loss: float | None
) -> tuple[Checkpoint, Path] | None:
    """Return the complete checkpoint whose eval_loss is below that of the live model, and the folder to read
    it from.

    None if there is none: the live model is the best. All processes get the same. Of a damaged checkpoint,
    the log has the reason, and the one of the next lowest loss is tried.

    Args:
        into: receives the files, as in `newest_complete`.
        like: what a checkpoint of the live model would be: those of later steps are another attempt's, and
            those whose eval_loss is of other held-out samples do not compare.
        loss: eval_loss of the live model; None if it was not scored.

    Raises:
        StorageError: the storage is unavailable, or denies access.
    """
    loss = gathered(loss, args)[0]
    earlier = [checkpoint for checkpoint in _seen_by_all(ledger, args) if checkpoint.step <= like.step]
    for checkpoint in by_loss(earlier, like):
        if checkpoint.step == like.step or (loss is not None and loss <= (checkpoint.eval_loss or 0.0)):
            return None
        fault = _fault(ledger, args, checkpoint, into)
        if fault is None:
            return checkpoint, into / checkpoint.folder
        where = f"{ledger.storage.address}/{checkpoint.folder}"
        log.warning(
            "%s has the lowest eval_loss and is not complete: %s; trying the next lowest", where, fault
        )
    return None


def _seen_by_all(ledger: Ledger, args: Any) -> list[Checkpoint]:
    """Return the checkpoints that every process sees, the newest first; another attempt may add and delete
    some meanwhile."""
    for look in range(3):
        mine, problem = capture_storage_error(ledger.checkpoints)
        looks = gathered((tuple(checkpoint.folder for checkpoint in mine or []), problem), args)
        _raise_first([problem for _, problem in looks])
        seen = [folders for folders, _ in looks]
        if len(set(seen)) == 1:
            return mine or []
        if look < 2:
            time.sleep(PAUSE)
    newest = [folders[0] if folders else None for folders in seen]
    raise TrainingError(
        f"rank {args.process_index}: checkpoints.folder is not one folder that all nodes see: the newest "
        f"checkpoint is {', '.join(f'{name} on rank {rank}' for rank, name in enumerate(newest))}; name a "
        "file system that is mounted into all pods, or an address (s3://...); the run does not continue by "
        "itself"
    )


def capture_storage_error(function: Callable[[], _T]) -> tuple[_T | None, str | None]:
    """Return a function's result, or the message of its StorageError, as peers would wait for a process that
    raises."""
    try:
        return function(), None
    except StorageError as error:
        return None, str(error)


def _raise_first(problems: list[str | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise StorageError(
                f"rank {rank}: {problem}; the run does not start: it may have checkpoints there"
            )


def _fault(ledger: Ledger, args: Any, checkpoint: Checkpoint, into: Path) -> str | None:
    """Return the first fault that any process finds in its share of the files; None if there is none."""
    if ledger.storage.is_local:
        if args.local_process_index == 0:
            ledger.link(checkpoint, into / checkpoint.folder)
        # Files are never written twice, so that the linked ones stay as they are.
        reason, problem = capture_storage_error(
            lambda: ledger.fault(checkpoint, share=Degrees(args.world_size).part(args.process_index))
        )
    else:
        local = slice(args.local_process_index, None, local_processes(args))
        reason, problem = capture_storage_error(
            lambda: ledger.fault(checkpoint, into / checkpoint.folder, local)
        )
    all_found = gathered((reason, problem), args)
    _raise_first([problem for _, problem in all_found])
    return next((reason for reason, _ in all_found if reason), None)


def local_processes(args: Any) -> int:
    """Return the number of processes on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))


def check(checkpoint: Checkpoint, ours: Checkpoint, resizes: bool) -> None:
    """Refuse a checkpoint that this run cannot take over, and log what of its recipe holds from the next step
    on.

    Args:
        ours: what a checkpoint of this run would be.
        resizes: whether the sharding can load a checkpoint of another number of processes.

    Raises:
        TrainingError: the checkpoint is of another base model or sharding, has another number of processes,
            or was written with other values of fields that a resumed run cannot change.
    """
    where = f"the checkpoint of step {checkpoint.step}"
    again = "or another checkpoints.name to start over"
    if checkpoint.sharding != ours.sharding:
        raise TrainingError(
            f"{where}: written under sharding {checkpoint.sharding}, and this run has {ours.sharding}, which "
            f"does not read it; the run does not continue. Choose the same sharding, {again}"
        )
    if checkpoint.world_size != ours.world_size and not resizes:
        processes = counted(checkpoint.world_size, "process", "processes")
        raise TrainingError(
            f"{where}: written by {processes}, and this run has {ours.world_size}; DeepSpeed cannot "
            f"repartition its states, and the run does not continue. Choose a shape of {processes}, {again}"
        )
    changed_base = _changed_base(checkpoint, ours)
    if changed_base is not None:
        raise TrainingError(
            f"{where}: trained from another base model: {changed_base}; its steps are not of this one, and "
            f"the run does not continue. Restore the base that it was trained from, {again}"
        )
    differences = changes.between(checkpoint.settings, ours.settings) if checkpoint.settings else {}
    refused = changes.refused(differences)
    if refused:
        raise TrainingError(
            f"{where}: written with other values of what a resumed run cannot change: {'; '.join(refused)}; "
            f"the run does not continue. Write the earlier values, {again}"
        )
    if checkpoint.flytune != __version__:
        log.warning("%s: written by flytune %s, this is %s", where, checkpoint.flytune, __version__)
    if checkpoint.decisions == ours.decisions:
        return
    described = list(differences.values()) if checkpoint.settings else ["another recipe or other data"]
    # Decisions end with the hash of the prepared data.
    if checkpoint.decisions.rpartition("-")[2] != ours.decisions.rpartition("-")[2]:
        other_data = "other prepared data, which is read from the same position on, and not before it"
        if _holds_out(ours.settings):
            other_data += ", and whose held-out samples may have been trained in the steps before"
        described.append(other_data)
    log.warning(
        "%s: written with %s; this run's hold from step %d on",
        where,
        "; ".join(described),
        checkpoint.step + 1,
    )


def _holds_out(settings: Mapping[str, str]) -> bool:
    """Return whether a run has held-out samples, which its evaluation scores even if no step is scored."""
    if "data.heldout_path" in settings or "data.eval_split" in settings:
        return True
    return settings.get("data.heldout_fraction") not in ("0", "0.0")


TEACHER = " + teacher "
"""Separator before a teacher's identity in Checkpoint.base."""


def _changed_base(checkpoint: Checkpoint, ours: Checkpoint) -> str | None:
    """Return how the base model of a checkpoint is another one than this run's; None if it is not, or if that
    is unknown."""
    before, now = (run.settings.get("model.name_or_path", "") for run in (checkpoint, ours))
    if checkpoint.base and ours.base:
        bases = [checkpoint.base, ours.base]
        if not all(TEACHER in base for base in bases):  # earlier versions did not record it
            bases = [base.partition(TEACHER)[0] for base in bases]
        is_other = bases[0] != bases[1]
    else:
        is_other = bool(checkpoint.settings) and before != now
    if not is_other:
        return None
    if before != now:
        return f"model.name_or_path: {before}, now {now}"
    return (
        f"{now} has the same name, and the content of its weights, of its config.json, of "
        f"method.adapter or of the teacher has changed ({checkpoint.base}, now {ours.base})"
    )


def check_resumed(resumed_step: int, step: int, args: Any) -> None:
    """Refuse to train from `step` where the checkpoint is of another one.

    Without a trainer_state.json, the Trainer would start at step 0 with the checkpoint's weights, without a
    warning.

    Raises:
        TrainingError: the steps differ.
    """
    if step != resumed_step:
        raise TrainingError(
            f"rank {args.process_index}: the checkpoint is of step {resumed_step}, and training would resume "
            f"from {step}; the run does not continue by itself"
        )


def check_length(resumed_step: int, steps: int) -> None:
    """Refuse to resume a run of `steps` steps from a later step.

    Raises:
        TrainingError: the checkpoint is of a later step.
    """
    if resumed_step > steps:
        raise TrainingError(
            f"the checkpoint is of step {resumed_step}, and with training.max_steps, or num_train_epochs and "
            f"the prepared data, this run has {counted(steps, 'step')}; its weights would have more steps "
            f"than the recipe says, and the run does not continue. Write training.max_steps: {resumed_step} "
            "or more, or another checkpoints.name to start over"
        )
