"""Checkpoint paths, when checkpoints are deleted, and this node's folders that attempts write into first."""

import fcntl
import glob
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from flytune.objectives import objective_of
from flytune.recipe import Recipe
from flytune.records import Manifest, TrainingResult
from flytune.storage import Storage
from flytune.training import earlier_attempts
from flytune.training.checkpoints.ledger import Ledger

log = logging.getLogger(__name__)

_LOCK = "lock"
_held: dict[Path, int] = {}


def open_folder(home: Path, attempt: str, node: int, is_first: bool) -> Path:
    """Return HOME/attempt-ATTEMPT/node-NODE, locked until it is closed, and remove the folders of processes
    that have ended.

    Args:
        is_first: this is the node's first process, which alone makes, locks and removes folders.
    """
    folder = home / f"attempt-{attempt}" / f"node-{node}"
    if is_first:
        while folder not in _held:
            _hold(folder)
        sweep(home)
    return folder


def _hold(folder: Path) -> None:
    """Make and lock a folder, unless another attempt's sweep removes it in between."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # Held until the process ends, however it ends; its data loader's workers hold it too.
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        return
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if os.fstat(descriptor).st_nlink:
        _held[folder] = descriptor
    else:
        os.close(descriptor)


def sweep(home: Path) -> None:
    """Remove the folders of attempts that have ended, and `home` itself when nothing is left."""
    # pathlib's glob ends with an error where another node's process removes a folder in between.
    for folder in map(home.joinpath, glob.glob("attempt-*/node-*", root_dir=home)):
        if folder not in _held and (descriptor := _taken(folder)) is not None:
            try:
                remove(folder)
            finally:
                os.close(descriptor)


def _taken(folder: Path) -> int | None:
    """Return a descriptor of the lock, held alone; None if another process holds it, or the file system has
    no locks.

    A folder without a lock was written into by an ending process during its removal; it gets a lock.
    """
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def close_folder(folder: Path) -> None:
    """Remove a folder that `open_folder` made."""
    if (descriptor := _held.pop(folder, None)) is not None:
        os.close(descriptor)
    remove(folder)


def remove(folder: Path) -> None:
    """Remove a node's folder, and its parents that hold nothing else: the attempt's, the run's."""
    # The lock last, so that the next sweep can complete an interrupted removal.
    for inside in map(folder.joinpath, glob.glob("*", root_dir=folder, include_hidden=True)):
        if inside.is_dir():
            shutil.rmtree(inside, ignore_errors=True)
        elif inside.name != _LOCK:
            inside.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    for above in (folder.parent, folder.parent.parent):
        try:
            above.rmdir()
        except OSError:
            log.debug("%s: not empty, or removed already", above)
            return


def run_key(recipe: Recipe, content_sha256: str) -> str:
    """Return the key of a run: of its decisions, without machines and trackers, so that a run resumes on
    another shape."""
    return f"{recipe.name}-{recipe.without_infrastructure().key()}-{content_sha256[:8]}"


def home_of(recipe: Recipe, key: str) -> Path:
    """Return the folder on this node that attempts write into before they store; trackers group runs by its
    name."""
    return Path(recipe.checkpoints.home).absolute() / (recipe.checkpoints.name or key)


def ledger_of(recipe: Recipe, key: str) -> Ledger:
    """Return the ledger of all attempts' checkpoints."""
    settings, home = recipe.checkpoints, home_of(recipe, key)
    address = (
        str(home) if settings.home == settings.address else f"{settings.address.rstrip('/')}/{home.name}"
    )
    return Ledger(Storage(address), settings.save_total_limit, keeps_best=settings.export == "best")


def clear(recipe: Recipe, manifest: Manifest, training: TrainingResult) -> None:
    """Delete the checkpoints of an attempt and of earlier ones, once its artifact is stored.

    Until then they are needed: an attempt that follows a pod lost in the upload resumes from them. The next
    run of the recipe is meant to train from the start, unless a budget stopped this one: then it is meant to
    resume, and they are kept.
    """
    if not training.attempt or training.stopped_early:
        return
    ledger = ledger_of(recipe, run_key(recipe, manifest.content_sha256))
    objective_of(recipe).clear(ledger.storage.address)
    if not recipe.checkpoints.save_steps:
        earlier_attempts.clear(ledger.storage.address)
        _remove_if_empty(ledger)
        return
    ledger.begin(training.attempt)
    ledger.clear()
    earlier_attempts.clear(ledger.storage.address)
    if ledger.storage.is_local:
        # Folders of attempts that were killed after the last sweep.
        sweep(Path(ledger.storage.address))
    _remove_if_empty(ledger)


def _remove_if_empty(ledger: Ledger) -> None:
    if ledger.storage.is_local:
        with suppress(OSError):  # another attempt is at work
            Path(ledger.storage.address).rmdir()
