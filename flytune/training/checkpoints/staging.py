"""Folders on this node's file systems that attempts write into before they store."""

import fcntl
import logging
import os
import shutil
from pathlib import Path

log = logging.getLogger(__name__)

_LOCK = "lock"
_held: dict[Path, int] = {}


def open_folder(home: Path, attempt: str, node: int, is_first: bool) -> Path:
    """HOME/attempt-ATTEMPT/node-NODE, which lasts until it is closed; what processes that are gone have left there is removed.

    Args:
        is_first: whether this is the node's first process, which alone makes, locks and removes.
    """
    folder = home / f"attempt-{attempt}" / f"node-{node}"
    if is_first:
        while folder not in _held:
            _hold(folder)
        sweep(home)
    return folder


def _hold(folder: Path) -> None:
    """Makes and locks a folder, unless another attempt's sweep has removed it between the two."""
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
    """Removes the folders of attempts that are gone, and `home` itself when nothing is left."""
    for folder in home.glob("attempt-*/node-*"):
        if folder not in _held and (descriptor := _taken(folder)) is not None:
            try:
                remove(folder)
            finally:
                os.close(descriptor)


def _taken(folder: Path) -> int | None:
    """Return a descriptor of the lock, held alone; None if another process holds it, or the file system has no locks.

    A folder without a lock is what a removal has left into which a process that was ending still wrote; it gets one.
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
    """Removes a folder that `open_folder` made."""
    if (descriptor := _held.pop(folder, None)) is not None:
        os.close(descriptor)
    remove(folder)


def remove(folder: Path) -> None:
    """A node's folder, and those above it that hold nothing else: the attempt's, the run's."""
    # The lock last: cut short, the next sweep goes on.
    for inside in folder.glob("*"):
        if inside.is_dir():
            shutil.rmtree(inside, ignore_errors=True)
        elif inside.name != _LOCK:
            inside.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    for above in (folder.parent, folder.parent.parent):
        try:
            above.rmdir()
        except OSError:
            log.debug("%s: not empty, or gone already", above)
            return
