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
        folder.mkdir(parents=True, exist_ok=True)
        # Held until the process ends, however it ends; its data loader's workers hold it too.
        _held[folder] = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT)
        fcntl.flock(_held[folder], fcntl.LOCK_SH)
        sweep(home)
    return folder


def sweep(home: Path) -> None:
    """Removes the folders of attempts that are gone, and `home` itself when nothing is left."""
    for lock in home.glob(f"attempt-*/node-*/{_LOCK}"):
        if lock.parent not in _held and _is_free(lock):
            remove(lock.parent)


def _is_free(lock: Path) -> bool:
    """Whether no process holds it; where a file system has no locks, that is not known, and it counts as held."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def close_folder(folder: Path) -> None:
    """Removes a folder that `open_folder` made."""
    if (descriptor := _held.pop(folder, None)) is not None:
        os.close(descriptor)
    remove(folder)


def remove(folder: Path) -> None:
    """A node's folder, and those above it that hold nothing else: the attempt's, the run's."""
    shutil.rmtree(folder, ignore_errors=True)
    for above in (folder.parent, folder.parent.parent):
        try:
            above.rmdir()
        except OSError:
            log.debug("%s: not empty, or gone already", above)
            return
