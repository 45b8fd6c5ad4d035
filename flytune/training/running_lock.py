"""The lock of a run on this machine: a second run of the same recipe and data learns of the first before it
trains."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TextIO

from flytune.errors import TrainingError
from flytune.storage import Storage
from flytune.training import attempt

_LONGEST = 1000


@contextmanager
def held(address: str) -> Iterator[None]:
    """Hold the lock of the run whose checkpoints are at an address, in its first process.

    The system gives the lock back when the process ends, however it does: one that is dead blocks nothing.
    There is none at the addresses of stores, nor in an execution of Flyte, whose attempts follow each other.

    Raises:
        TrainingError: another process holds it; says which.
    """
    storage = Storage(address)
    if (
        not storage.is_local
        or os.environ.get("RANK", "0") != "0"
        or os.environ.get("FLYTE_INTERNAL_EXECUTION_ID")
    ):
        yield
        return
    folder = Path(storage.path())
    path = folder.with_name(f".{folder.name}.lock")
    file = _locked(path, address)
    try:
        yield
    finally:
        if file is not None:
            path.unlink(missing_ok=True)
            file.close()


def _locked(path: Path, address: str) -> TextIO | None:
    """Return the locked file; None where its file system has no locks, or it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError:
        return None
    try:
        # Not flock, which processes that are forked would hold on to.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read(_LONGEST).strip() or "a process that has just begun"
        file.close()
        raise TrainingError(
            f"{address}: another run of this recipe and data trains there: {holder}; it is alive, as it "
            f"holds the lock {path}. Wait for it, or end it and run this again, which resumes from its "
            "newest checkpoint; for a second run beside it, give this one a checkpoints.name of its own"
        ) from None
    except OSError:
        file.close()
        return None
    if not _is_at(file, path):  # its holder ended, and deleted it, after it was opened here
        file.close()
        return _locked(path, address)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {attempt.host()}, since {datetime.now():%Y-%m-%d %H:%M:%S}")
    file.flush()
    return file


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
