"""Reports of failed ranks, and the cause of a failure: the rank that failed first.

A rank reports its failure as a file in a folder that the node's ranks share; the process that started them
reads the files and names the cause. A rank that lost a peer is not the cause: it waits a moment, so that the
peer's failure is seen first.
"""

import logging
import os
import signal
import time
import traceback
from pathlib import Path

from flytune.failures.table import BUG, CRASH, KINDS, FailureKind, kind_of
from flytune.files import written_atomically
from flytune.schema import Record, RecordError

log = logging.getLogger(__name__)

FOLDER = "FLYTUNE_FAILURES"
"""Environment variable that names the folder in which the ranks of a node report; not set in a run of one
process."""
SECONDS_AFTER_NOTICING = 3.0
"""Seconds that a rank which lost a peer waits; longer than torchelastic's monitor_interval of 1 s."""


class Failure(Record):
    """Failure of one rank."""

    rank: int
    time: float
    """Time of the failure, in seconds since 1970."""
    kind: str
    message: str
    advice: str
    recoverable: bool
    notices: bool
    details: str = ""
    """A traceback, or the stacks of a hang."""

    @property
    def sentence(self) -> str:
        """Cause of the failure in a sentence, with its kind."""
        return self.message if self.message.startswith(self.kind) else f"{self.kind}: {self.message}"

    def __str__(self) -> str:
        where = f"\n{self.details.rstrip()}" if self.details else ""
        return f"rank {self.rank}: {self.sentence}\nwhat to do: {self.advice}{where}"


def of_error(error: BaseException, rank: int) -> Failure:
    """Return the failure of a rank with an exception. TrainingError.goes_on overrides the table."""
    kind = kind_of(error)
    message = str(error) if kind.types and kind.types[0].startswith("flytune.") else ""
    return _failure(
        kind,
        rank,
        message.removeprefix(f"rank {rank}: ") or f"{type(error).__name__}: {error}",
        recoverable=kind.recoverable or getattr(error, "goes_on", False),
        details="".join(traceback.format_exception(error)) if kind is BUG else "",
    )


def of_exit(exitcode: int, rank: int) -> Failure:
    """Return the failure of a rank without a report, from its exit code (negative: the signal that ended
    it)."""
    number = -exitcode if exitcode < 0 else exitcode - 128
    kind = next((kind for kind in KINDS if number in kind.signals), CRASH)
    try:
        ended = f"ended by {signal.Signals(number).name}"
    except ValueError:
        ended = f"ended with exit code {exitcode}"
    because = ", which the kernel sends when a pod is out of memory" if number == signal.SIGKILL else ""
    return _failure(kind, rank, ended + because)


def _failure(
    kind: FailureKind, rank: int, message: str, recoverable: bool | None = None, details: str = ""
) -> Failure:
    return Failure(
        rank=rank,
        time=time.time(),
        kind=kind.name,
        message=message,
        advice=kind.advice,
        recoverable=kind.recoverable if recoverable is None else recoverable,
        notices=kind.notices,
        details=details,
    )


def report(failure: Failure) -> None:
    """Write a failure for the process that started the ranks; the first one of a rank is kept."""
    if not (folder := os.environ.get(FOLDER)):
        return
    if failure.notices:
        time.sleep(SECONDS_AFTER_NOTICING)
    file = Path(folder) / f"{failure.rank}.json"
    if file.exists():
        log.warning("after its first failure: %s", failure)
        return
    with written_atomically(file) as temporary:
        failure.write(temporary)


def reported(folder: Path) -> list[Failure]:
    """Return the failures that the ranks of this node have reported."""
    failures = []
    for path in sorted(folder.glob("*.json")):
        try:
            failures.append(Failure.read(path))
        except (RecordError, OSError) as error:
            log.warning("%s: an incomplete report: %s", path, error)
    return failures


def first(failures: list[Failure]) -> Failure:
    """Return the cause: the earliest failure that is not a lost peer; of a hang, with the stacks of all
    ranks."""
    cause = min(failures, key=lambda failure: (failure.notices, failure.time, failure.rank))
    alike = sorted(
        (failure for failure in failures if failure.kind == cause.kind == "hang"),
        key=lambda failure: failure.rank,
    )
    if len(alike) < 2:
        return cause
    stacks = "\n".join(f"rank {failure.rank}:\n{failure.details.rstrip()}" for failure in alike)
    return cause.model_copy(update={"details": stacks})
