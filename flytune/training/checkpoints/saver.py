"""A run's checkpoints, from the Trainer's folder on this node to the ledger: stored beside training, one at a time."""

import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from flytune import __version__
from flytune.errors import StorageError
from flytune.recipe.recipe import Recipe
from flytune.records.training import STEPS
from flytune.sharding import sharding_of
from flytune.storage import failure
from flytune.training import trackers
from flytune.training.checkpoints import callback, paths, staging
from flytune.training.checkpoints import resume as checkpoints_resume
from flytune.training.checkpoints.async_save import Beside
from flytune.training.checkpoints.ledger import Checkpoint
from flytune.training.checkpoints.resume import gathered
from flytune.training.step_log import Recorder

log = logging.getLogger(__name__)

STREAMS = 4
"""Files of a node that are stored at once."""
PATIENCE = 600.0
"""Seconds that the first node waits for the others' parts once its own is stored; they began at the same time."""
FAILURES = 2
"""Checkpoints in a row that were not stored, at which a run stops."""
_NO_ROOM = 2**26
"""Bytes free at most, where a write that failed is taken to have failed for that."""


class CheckpointPublisher(Protocol):
    """Publication of checkpoints while training goes on; its methods never raise."""

    def take(self, checkpoint: Path, step: int) -> None:
        """Keep what is to be published of a checkpoint's folder, which may then be moved away."""

    def begin(self) -> None:
        """Publish in the background what was taken; its checkpoint is complete."""

    def finish(self) -> None:
        """Wait a moment for the upload that is under way; the run is over."""


class Saver:
    """The checkpoints of one run, on one of its processes. All processes call its methods, in the same order."""

    def __init__(
        self, recipe: Recipe, content_sha256: str, publisher: Callable[[Recipe, str], CheckpointPublisher] | None = None
    ) -> None:
        self.recipe, self.key = recipe, paths.run_key(recipe, content_sha256)
        self.home, self.ledger = paths.home_of(recipe, self.key), paths.ledger_of(recipe, self.key)
        self.resumed_step, self.resumed_seconds = 0, 0.0
        self.spent: Callable[[], float] = lambda: 0.0
        """Seconds of training so far, all attempts together; whoever stops the run says it."""
        self.saved_step = 0
        """Of the newest checkpoint that is known to be whole."""
        self.store_seconds = 0.0
        """The longest that storing a checkpoint took beside training."""
        self._beside = Beside()
        self._publisher = publisher(recipe, self.key) if publisher else None
        self._pending: int | None = None
        """The step whose checkpoint is being stored."""
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        self._failures, self._reason, self._bytes = 0, "", 0

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint at the address; 0 where none is, or none is written."""
        found = self.ledger.checkpoints() if self.recipe.checkpoints.save_steps else []
        return found[0].step if found else 0

    def begin(self, args: Any) -> None:
        """Agrees on this attempt's id, and gives the Trainer a folder of its own on each node."""
        self.args, self.node = args, args.process_index // checkpoints_resume.local_processes(args)
        # Without checkpoints, the address is never asked.
        known = None if self.recipe.checkpoints.save_steps else f"0000-{secrets.token_hex(3)}"
        mine, problem = checkpoints_resume.told(lambda: self.ledger.begin(known)) if args.process_index == 0 else (None, None)
        attempt, problem = gathered((mine, problem), args)[0]
        if attempt is None:
            raise StorageError(f"{problem}; the run does not start")
        self.ledger.begin(attempt)
        self.folder = staging.open_folder(self.home, attempt, self.node, args.local_process_index == 0)
        args.output_dir = str(self.folder)

    def resume(self, resizes: bool) -> Path | None:
        """The checkpoint to go on from, on this node's file systems; the log and the trackers' runs are gone on with too.

        Args:
            resizes: whether the sharding can lay a checkpoint of another number of processes out anew.

        Raises:
            TrainingError: this run cannot read it, or processes see different ones.
            StorageError: whether there is one cannot be told.
        """
        trackers.go_on({})
        if not self.recipe.checkpoints.save_steps:
            return None

        def check(checkpoint: Checkpoint) -> None:
            checkpoints_resume.check(checkpoint, self.key, self.recipe.sharding.name, self.args.world_size, resizes)

        found = checkpoints_resume.newest_whole(self.ledger, self.args, self.folder / "resumed", check)
        if found is None:
            return None
        checkpoint, folder = found
        self.resumed_step = self.saved_step = checkpoint.step
        self.resumed_seconds = checkpoint.seconds
        trackers.go_on(checkpoint.trackers)
        if self.args.process_index == 0 and (folder / STEPS).is_file():
            shutil.copy(folder / STEPS, self.folder)
        return folder

    def attach(self, trainer: Any, recorder: Recorder) -> None:
        """Has the Trainer's checkpoints stored."""
        save = trainer._save_checkpoint

        def saved(model: Any, trial: Any) -> None:
            if self._has_room():
                self._save(lambda: save(model, trial), trainer.state.global_step, recorder)

        trainer._save_checkpoint = saved
        trainer.add_callback(callback.callback(self))

    def settle(self) -> None:
        """Waits until the checkpoint that is being stored is whole; if it is not to be, the first process logs why."""
        if self._pending is None:
            return
        if self._thread:
            self._thread.join()
        else:
            _, self._problem = checkpoints_resume.told(self._beside.wait)
        problems = gathered(self._problem, self.args)
        if any(problems):
            self._failed("; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem))
        else:
            self.saved_step, self._failures = self._pending, 0
        self._pending = self._thread = self._problem = None

    def settled_step(self) -> int:
        """Of the newest whole checkpoint, once the one that is being stored is settled; all processes call it."""
        self.settle()
        return self.saved_step

    def _failed(self, reason: str) -> None:
        self._failures, self._reason = self._failures + 1, reason
        if self.args.process_index == 0:
            log.warning("a checkpoint was not stored; the last whole one is of step %d: %s", self.saved_step, reason)

    def _has_room(self) -> bool:
        """Waits for the checkpoint before, and says whether all nodes have room for another.

        Raises:
            StorageError: the second in a row that is not stored.
        """
        self.settle()
        free = shutil.disk_usage(self.folder).free
        lacks = f"{self.folder}: {free:,} bytes are free, a checkpoint has {self._bytes:,}" if free < self._bytes else None
        lacking = [reason for reason in gathered(lacks, self.args) if reason]
        if lacking:
            self._failed(lacking[0])
        if self._failures >= FAILURES:
            raise StorageError(
                f"{self._failures} checkpoints in a row were not stored: {self._reason}; the run stops, and goes on from step "
                f"{self.saved_step} when it is started again"
            )
        return not lacking

    def _save(self, save: Callable[[], None], step: int, recorder: Recorder) -> None:
        folder = self.folder / f"checkpoint-{step}"
        # DeepSpeed makes this one on the first node alone.
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with self._beside.saving() if sharding_of(self.recipe).async_checkpoint else nullcontext():
                save()
            if self.args.process_index == 0:
                shutil.copy(recorder.file, folder / STEPS)
        except Exception as error:
            # torch and safetensors have each an error of their own for a full disk.
            if (free := shutil.disk_usage(self.folder).free) > _NO_ROOM and failure(error) != "full":
                raise
            raise StorageError(
                f"rank {self.args.process_index}: {folder}: the checkpoint could not be written, {free:,} bytes are free: make "
                f"room, or lower checkpoints.save_total_limit; the run goes on from step {self.saved_step} when it is started "
                f"again: {error}"
            ) from error
        # All that this node's processes wrote is there, or written beside training.
        gathered(None, self.args)
        self._pending = step
        if self.args.local_process_index == 0:
            checkpoint = self._describe(step, recorder)
            # No daemon: a process that fails still stores what is trained.
            self._thread = threading.Thread(target=self._store, args=(checkpoint, folder), name=f"storing step {step}")
            self._thread.start()

    def _describe(self, step: int, recorder: Recorder) -> Checkpoint:
        scored = recorder.steps[-1].eval_loss if recorder.steps and recorder.steps[-1].step == step else None
        return Checkpoint(
            step=step,
            attempt=self.ledger.attempt,
            decisions=self.key,
            sharding=self.recipe.sharding.name,
            world_size=self.args.world_size,
            eval_loss=scored,
            trackers=trackers.run_ids(),
            seconds=self.spent(),
            flytune=__version__,
        )

    def _store(self, checkpoint: Checkpoint, folder: Path) -> None:
        """In a thread: this node's files, then its part; on the first node, then the manifest."""
        began = time.monotonic()
        try:
            self._beside.wait()
            if self._publisher and self.node == 0:
                self._publisher.take(folder, checkpoint.step)
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            self._bytes = sum(path.stat().st_size for path in files)
            with ThreadPoolExecutor(STREAMS, thread_name_prefix="storing") as streams:
                stored = list(
                    streams.map(lambda file: self.ledger.put(checkpoint, file, file.relative_to(folder).as_posix()), files)
                )
            self.ledger.put_part(checkpoint, self.node, stored)
            if self.node == 0:
                self.ledger.commit(checkpoint.model_copy(update={"files": self._all_files(checkpoint)}))
                if self._publisher:
                    self._publisher.begin()
        except Exception as error:  # noqa: BLE001 (told to the main thread, which decides)
            self._problem = f"{type(error).__name__}: {error}" if not isinstance(error, StorageError) else str(error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self.store_seconds = max(self.store_seconds, time.monotonic() - began)

    def _all_files(self, checkpoint: Checkpoint) -> list[Any]:
        nodes = self.args.world_size // checkpoints_resume.local_processes(self.args)
        began = time.monotonic()
        while (files := self.ledger.parts(checkpoint, nodes)) is None:
            # A process that ends has no peers left to wait for.
            patience = PATIENCE if threading.main_thread().is_alive() else min(PATIENCE, 20.0)
            if time.monotonic() - began > patience:
                raise StorageError(f"{checkpoint.folder}: a node's part was not stored within {patience:.0f} s")
            time.sleep(0.5)
        return files

    def weights_at(self, step: int) -> str | None:
        """Says what the weights of a trainer are that stands at `step`, on all processes: the digest of the checkpoint there.

        None where there is none. Two runs of one recipe need not end with the same bits.
        """
        found = self.ledger.checkpoints() if self.args.process_index == 0 and self.saved_step == step > 0 else []
        digest: str | None = gathered(next((one.digest for one in found if one.step == step), None), self.args)[0]
        return digest

    def finish(self) -> None:
        """The run is over. Its checkpoints stay until its artifact is stored (places.clear)."""
        if self._publisher:
            self._publisher.finish()
        gathered(None, self.args)
        if self.args.local_process_index == 0:
            staging.close_folder(self.folder)
            staging.sweep(self.home)
