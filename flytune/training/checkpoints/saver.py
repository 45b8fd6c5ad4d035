"""Asynchronous storing of checkpoints, from the Trainer's folder on this node to the ledger, one at a
time.

Of sharded checkpoints training waits for the copy to host memory, and not for the disk (AsyncSave).
"""

import hashlib
import json
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from flytune import __version__, patches
from flytune.errors import StorageError, StorageFull
from flytune.models import Row, base_identity, initial_adapter
from flytune.objectives.bound import BoundRecipe
from flytune.recipe import Recipe
from flytune.records.training import STEPS
from flytune.sentences import counted
from flytune.storage import failure
from flytune.training import trackers
from flytune.training.checkpoints import changes, paths
from flytune.training.checkpoints import resume as checkpoints_resume
from flytune.training.checkpoints.ledger import Checkpoint, history_until
from flytune.training.checkpoints.resume import capture_storage_error, gathered
from flytune.training.step_log import Recorder


class AsyncSave:
    """Asynchronous writes of one process; all processes save at the same time."""

    def __init__(self) -> None:
        self._groups: list[Any] = []
        """Process groups, one for each save of a checkpoint (model, optimizer): their threads must not meet
        in a collective."""
        self._writing: list[Any] = []

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Make torch.distributed.checkpoint.save copy its arguments, and a thread write the copy."""
        import torch
        from torch.distributed.checkpoint.staging import BlockingAsyncStager
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self._writing = []

        def save(state_dict: Any, *, storage_writer: Any = None, planner: Any = None) -> None:
            number = len(self._writing)
            if number == len(self._groups):
                self._groups.append(torch.distributed.new_group(backend="gloo"))
            where = {
                "storage_writer": storage_writer,
                "planner": planner,
                "process_group": self._groups[number],
            }
            self._writing.append(async_save(state_dict, async_stager=BlockingAsyncStager(), **where))

        with patches.torch.CHECKPOINT_SAVE.replaced(
            save
        ):  # accelerate looks it up in the module at each save
            yield

    def wait(self) -> None:
        """Wait until all processes have written what was saved.

        Raises:
            StorageError: a write failed, on any process.
        """
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            for future in self._writing:
                future.result()
        except CheckpointException as error:
            # It is not an Exception; it contains the errors of all processes.
            cause = next((reason for reason, _ in error.failures.values()), error)
            raise StorageFull(f"the checkpoint could not be written: {cause}") from error


log = logging.getLogger(__name__)

STREAMS = 4
"""Number of a node's files that are stored at once."""
PATIENCE = 600.0
"""Seconds that the first node waits for the other nodes' parts after its own is stored; all begin at the same
time."""
FAILURES = 2
"""Number of checkpoints in a row that are not stored, after which a run stops."""
RESUMED = "resumed"
"""Folder in the Trainer's folder for the checkpoint that the run resumes from."""
BEST = "best"
"""Folder in the Trainer's folder for the checkpoint of the lowest eval_loss."""
_NO_ROOM = 2**26
"""Free bytes below which a failed write is attributed to a full disk."""


class CheckpointPublisher(Protocol):
    """Publisher of the weights at saves during training; its methods never raise."""

    @property
    def is_uploading(self) -> bool:
        """True while it uploads; it is then given no other weights."""

    def take(self, weights: Path, step: int) -> None:
        """Take a folder of weights, which is moved."""

    def begin(self) -> None:
        """Publish the weights in the background; their checkpoint is complete."""

    def finish(self) -> None:
        """Wait a moment for a running upload at the end of the run."""


class Saver(BoundRecipe):
    """Saver of one run's checkpoints on one of its processes. All processes call its methods, in the same
    order."""

    def __init__(
        self,
        recipe: Recipe,
        content_sha256: str,
        publisher: Callable[[Recipe, str], CheckpointPublisher] | None = None,
        scored_rows: Sequence[Row] = (),
        teacher: str = "",
    ) -> None:
        """Make it; eval_loss is computed of `scored_rows`, and `teacher` is the identity of a teacher."""
        super().__init__(recipe)
        self._teacher = teacher
        self.key = paths.run_key(recipe, content_sha256)
        self._content_sha256, self._settings = content_sha256, changes.settings_of(recipe)
        self._scored_on = changes.scored_on(self._settings, scored_rows)
        self.order = changes.order_of(self._settings, content_sha256)
        """Key of the data and its order."""
        self._base, self._history = "", list[tuple[int, str]]()
        self.scored_since = 0
        """Step after which all scores of the run are of the same held-out samples."""
        self.home, self.ledger = paths.home_of(recipe, self.key), paths.ledger_of(recipe, self.key)
        self.address: str = self.ledger.storage.address
        """Address of the run's checkpoints and notes."""
        self.resumed_step, self.resumed_seconds = 0, 0.0
        """Step and seconds of training of the checkpoint that the run resumes from."""
        self.resumed_loss: float | None = None
        """Held-out loss of that checkpoint; None if it was not scored, or on other samples."""
        self.saved_step = 0
        """Step of the newest complete checkpoint."""
        self.store_seconds = 0.0
        """Longest time that storing a checkpoint took, in seconds."""
        self._async_save = AsyncSave()
        self._publisher = publisher(recipe, self.key) if publisher else None
        self._pending: int | None = None
        """Step whose checkpoint is being stored."""
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        self._failures, self._reason, self._bytes = 0, "", 0
        self._gathered_bytes = 0
        """Bytes of the weights that were written to be published."""

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint at the address; 0 where there is none, or none is
        written."""
        checkpoints = self.ledger.checkpoints() if self.recipe.checkpoints.save_steps else []
        return checkpoints[0].step if checkpoints else 0

    def begin(self, args: Any) -> None:
        """Agree on this attempt's id, and give the Trainer a folder of its own on each node."""
        self.args, self.node = args, args.process_index // checkpoints_resume.local_processes(args)
        # Without checkpoints, the storage is never accessed.
        given = None if self.recipe.checkpoints.save_steps else f"0000-{secrets.token_hex(3)}"
        mine, problem = (
            capture_storage_error(lambda: self.ledger.begin(given))
            if args.process_index == 0
            else (None, None)
        )
        attempt, problem = gathered((mine, problem), args)[0]
        if attempt is None:
            raise StorageError(f"{problem}; the run does not start")
        self.ledger.begin(attempt)
        if self.recipe.checkpoints.save_steps or self.objective.draws():
            mine = _base_of(self.recipe, self._teacher) if args.process_index == 0 else ""
            self._base = gathered(mine, args)[0]
        self._history = [(0, changes.trained_with(self._settings, self._base, self._content_sha256))]
        self.folder = paths.open_folder(self.home, attempt, self.node, args.local_process_index == 0)
        args.output_dir = str(self.folder)

    def resume(self, resizes: bool) -> Path | None:
        """Return the checkpoint to resume from, on this node's file systems, and resume the step log and the
        trackers' runs.

        Args:
            resizes: the sharding can load a checkpoint of another number of processes.

        Raises:
            TrainingError: this run cannot read the checkpoint, or processes see different ones.
            StorageError: the storage cannot be read.
        """
        trackers.resume_runs({})
        if not self.recipe.checkpoints.save_steps:
            return None

        def check(checkpoint: Checkpoint) -> None:
            checkpoints_resume.check(checkpoint, self._own(checkpoint.step), resizes)

        complete = checkpoints_resume.newest_complete(self.ledger, self.args, self.folder / RESUMED, check)
        if complete is None:
            return None
        checkpoint, folder = complete
        self.resumed_step = self.saved_step = checkpoint.step
        self.resumed_seconds = checkpoint.seconds
        self._continue(checkpoint)
        trackers.resume_runs(checkpoint.trackers)
        if self.args.process_index == 0 and (folder / STEPS).is_file():
            shutil.copy(folder / STEPS, self.folder)
        return folder

    def _continue(self, checkpoint: Checkpoint) -> None:
        """Continue what a checkpoint says about the steps before it."""
        earlier = checkpoint.history or [(0, checkpoint.decisions)]
        ours = self._history[-1][1]
        self._history = earlier if earlier[-1][1] == ours else [*earlier, (checkpoint.step, ours)]
        is_same = (
            checkpoint.scored_on == self._scored_on
            if checkpoint.scored_on
            else checkpoint.decisions == self.key
        )
        self.scored_since = checkpoint.scored_since if is_same else checkpoint.step
        self.resumed_loss = checkpoint.eval_loss if is_same else None

    def weights_after(self, step: int) -> str:
        """Return 16 hex digits of all that the weights after `step` follow from, in this attempt and in those
        before it."""
        start = changes.started_from(self._settings, self._base)
        content = json.dumps([start, history_until(step, self._history)])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def save(
        self,
        write: Callable[[], None],
        step: int,
        recorder: Recorder,
        spent: Callable[[], float],
        write_weights: Callable[[Path], object] | None = None,
    ) -> None:
        """Write a checkpoint, if all nodes have room for it, and begin to store it.

        Args:
            write: makes the Trainer write it.
            spent: returns the seconds of training so far, all attempts together.
            write_weights: gathers the trained weights and writes them to a folder; None if there is no time
                for it.

        Raises:
            StorageError: the disk is full, or several checkpoints in a row were not stored.
        """
        if self._has_room():
            weights = self.folder / f"weights-{step}"
            gathers = self._gathers_now(step, in_time=write_weights is not None)

            def write_all() -> None:
                with self._async_save.saving() if self.sharding.async_checkpoint else nullcontext():
                    write()
                if gathers and write_weights:
                    write_weights(weights)

            self._save(write_all, step, recorder, spent)

    def end_step(self, step: int) -> None:
        """Delete the fetched checkpoint after the first step: by then all of this node's processes have read
        it."""
        if step == self.resumed_step + 1 and self.args.local_process_index == 0:
            shutil.rmtree(self.folder / RESUMED, ignore_errors=True)

    def settle(self) -> None:
        """Wait until the checkpoint that is being stored is complete; if storing fails, the first process
        logs why."""
        if self._pending is None:
            return
        if self._thread:
            self._thread.join()
        else:
            _, self._problem = capture_storage_error(self._async_save.wait)
        problems = gathered(self._problem, self.args)
        if any(problems):
            self._failed(
                "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)
            )
        else:
            self.saved_step, self._failures = self._pending, 0
        self._pending = self._thread = self._problem = None

    def settled_step(self) -> int:
        """Return the step of the newest complete checkpoint, after `settle`. Every process calls it."""
        self.settle()
        return self.saved_step

    def _failed(self, reason: str) -> None:
        self._failures, self._reason = self._failures + 1, reason
        if self.args.process_index == 0:
            log.warning(
                "a checkpoint was not stored; the last complete one is of step %d: %s",
                self.saved_step,
                reason,
            )

    def _has_room(self) -> bool:
        """Wait for the previous checkpoint, and return whether all nodes have room for another.

        Raises:
            StorageError: the second in a row was not stored.
        """
        self.settle()
        free = shutil.disk_usage(self.folder).free
        lacks = (
            f"{self.folder}: {free:,} bytes are free, a checkpoint has {self._bytes:,}"
            if free < self._bytes
            else None
        )
        lacking = [reason for reason in gathered(lacks, self.args) if reason]
        if lacking:
            self._failed(lacking[0])
        if self._failures >= FAILURES:
            raise StorageError(
                f"{counted(self._failures, 'checkpoint')} in a row were not stored: {self._reason}; the run "
                "stops, and resumes from "
                f"step {self.saved_step} when it is started again"
            )
        return not lacking

    def _gathers_now(self, step: int, in_time: bool) -> bool:
        """Return on all processes whether the weights of `step` are gathered to be published; the first logs
        why not."""
        if not self._publisher or not self.recipe.publish.every_save:
            return False
        reason = None if in_time else "the run is being stopped"
        if self.args.process_index == 0 and not reason:
            free, needed = shutil.disk_usage(self.folder).free, self._bytes + self._gathered_bytes
            if self._publisher.is_uploading:
                reason = "an earlier step is still being uploaded"
            elif free < needed:
                reason = (
                    f"{self.folder}: {free:,} bytes are free, a checkpoint and its gathered weights "
                    f"have {needed:,}"
                )
        reasons = [reason_of_rank for reason_of_rank in gathered(reason, self.args) if reason_of_rank]
        if reasons and self.args.process_index == 0:
            log.warning("step %d is not published: %s", step, reasons[0])
        return not reasons

    def _save(
        self, write: Callable[[], None], step: int, recorder: Recorder, spent: Callable[[], float]
    ) -> None:
        folder = self.folder / f"checkpoint-{step}"
        # DeepSpeed makes this folder on the first node only.
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write()
            if self.args.process_index == 0:
                shutil.copy(recorder.file, folder / STEPS)
        except Exception as error:
            # torch and safetensors each have their own error for a full disk.
            free = shutil.disk_usage(self.folder).free
            if free > _NO_ROOM and failure(error) != "full":
                raise
            raise StorageFull(
                f"rank {self.args.process_index}: {folder}: the checkpoint could not be written, {free:,} "
                "bytes are free: make room, or lower checkpoints.save_total_limit; the run resumes from step "
                f"{self.saved_step} when it is started again: {error}"
            ) from error
        # All files of this node's processes are written, or are being written asynchronously.
        gathered(None, self.args)
        self._pending = step
        if self.args.local_process_index == 0:
            checkpoint = self._describe(step, recorder, spent())
            # No daemon: a process that fails still stores its checkpoint.
            self._thread = threading.Thread(
                target=self._store, args=(checkpoint, folder), name=f"storing step {step}"
            )
            self._thread.start()

    def _describe(self, step: int, recorder: Recorder, seconds: float) -> Checkpoint:
        scored = recorder.steps[-1].eval_loss if recorder.steps and recorder.steps[-1].step == step else None
        update = {"eval_loss": scored, "trackers": trackers.run_ids(), "seconds": seconds}
        return self._own(step).model_copy(update=update)

    def _own(self, step: int) -> Checkpoint:
        """Return what all checkpoints of this run say, of a step."""
        return Checkpoint(
            step=step,
            attempt=self.ledger.attempt,
            decisions=self.key,
            settings=self._settings,
            base=self._base,
            history=self._history,
            scored_on=self._scored_on,
            scored_since=self.scored_since,
            sharding=self.recipe.sharding.name,
            world_size=self.args.world_size,
            flytune=__version__,
        )

    def _store(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Store this node's files and its part, and on the first node the manifest; runs in a thread."""
        began = time.monotonic()
        weights = self.folder / f"weights-{checkpoint.step}"
        try:
            self._async_save.wait()
            if self._publisher and weights.is_dir():
                self._gathered_bytes = sum(
                    path.stat().st_size for path in weights.rglob("*") if path.is_file()
                )
                self._publisher.take(weights, checkpoint.step)
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            self._bytes = sum(path.stat().st_size for path in files)
            with ThreadPoolExecutor(STREAMS, thread_name_prefix="storing") as streams:
                stored = list(
                    streams.map(
                        lambda file: self.ledger.put(checkpoint, file, file.relative_to(folder).as_posix()),
                        files,
                    )
                )
            self.ledger.put_part(checkpoint, self.node, stored)
            if self.node == 0:
                self.ledger.commit(checkpoint.model_copy(update={"files": self._all_files(checkpoint)}))
                if self._publisher:
                    self._publisher.begin()
        except Exception as error:  # noqa: BLE001 (reported to the main thread, which decides)
            self._problem = (
                f"{type(error).__name__}: {error}" if not isinstance(error, StorageError) else str(error)
            )
        finally:
            for written in (folder, weights):
                shutil.rmtree(written, ignore_errors=True)
            self.store_seconds = max(self.store_seconds, time.monotonic() - began)

    def _all_files(self, checkpoint: Checkpoint) -> list[Any]:
        nodes = self.args.world_size // checkpoints_resume.local_processes(self.args)
        began = time.monotonic()
        while (files := self.ledger.parts(checkpoint, nodes)) is None:
            # A process that is ending has no peers to wait for.
            patience = PATIENCE if threading.main_thread().is_alive() else min(PATIENCE, 20.0)
            if time.monotonic() - began > patience:
                raise StorageError(
                    f"{checkpoint.folder}: a node's part was not stored within {patience:.0f} s"
                )
            time.sleep(0.5)
        return files

    def weights_at(self, step: int) -> str | None:
        """Return the digest of the checkpoint of `step`, which identifies a trainer's weights there; None
        where there is none.

        All processes get the same. Two runs of one recipe need not end with the same bits.
        """
        checkpoints = (
            self.ledger.checkpoints() if self.args.process_index == 0 and self.saved_step == step > 0 else []
        )
        digest: str | None = gathered(
            next((checkpoint.digest for checkpoint in checkpoints if checkpoint.step == step), None),
            self.args,
        )[0]
        return digest

    def best(self, step: int, loss: float | None) -> tuple[Checkpoint, Path] | None:
        """Return the checkpoint to export instead of the live model after `step`, and the folder to read it
        from.

        None where the live model is to be exported: checkpoints.export is last, or no eval_loss is below its
        `loss`.
        """
        if self.recipe.checkpoints.export == "last":
            return None
        return checkpoints_resume.lowest_loss(
            self.ledger, self.args, self.folder / BEST, self._own(step), loss
        )

    def finish(self) -> None:
        """End the run. Its checkpoints are kept until its artifact is stored (paths.clear)."""
        if self._publisher:
            self._publisher.finish()
        gathered(None, self.args)
        if self.args.local_process_index == 0:
            paths.close_folder(self.folder)
            paths.sweep(self.home)


def _base_of(recipe: Recipe, teacher: str) -> str:
    """Return the identity of what training follows from: the base model, method.adapter and a teacher; empty
    where that of the base is unknown."""
    base, adapter = (
        base_identity.identity_of(recipe.model),
        initial_adapter.weights_sha256(recipe.method)[:16],
    )
    if not base:
        return ""
    start = f"{base} + {adapter}" if adapter else base
    return f"{start}{checkpoints_resume.TEACHER}{teacher}" if teacher else start
