"""Bad rows: the first one stops the run, or up to a given share of them is set aside, each with its
reason."""

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

from flytune.errors import DataError
from flytune.files import written_atomically
from flytune.schema import Record
from flytune.sentences import counted

logger = logging.getLogger(__name__)
BAD_ROWS = "bad_rows.jsonl"
_LOCATION = re.compile(r"(?P<file>.*?)(?::|, item |, row )(?P<line>\d+)", re.DOTALL)
_SHOWN = 5
_GRACE_ROWS = 10_000
"""Rows after which a source with more bad rows than good ones stops the run before all rows are read."""


class BadRow(Record):
    """A line of bad_rows.jsonl."""

    file: str
    line: int | None
    """Number of the line, or of the row or item of a file that has no lines."""
    reason: str

    @classmethod
    def of(cls, where: str, error: DataError) -> Self:
        """Return a row by its location and its error."""
        location = _LOCATION.fullmatch(where)
        file, line = (location["file"], int(location["line"])) if location else (where, None)
        return cls(file=file, line=line, reason=str(error).removeprefix(where).lstrip(": "))


def read_list(path: Path) -> list[BadRow]:
    """Return the rows of a list of bad rows; none if there is no such file.

    Raises:
        RecordError: it is no such list.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [BadRow.parse(line) for line in lines]


def write_list(rows: Sequence[BadRow], path: Path) -> None:
    """Write a list of bad rows."""
    with written_atomically(path) as temporary:
        temporary.write_text("".join(row.model_dump_json() + "\n" for row in rows), encoding="utf-8")


class BadRows:
    """Writer of bad_rows.jsonl: a line (file, line, reason) for each bad row; no file when there is none."""

    def __init__(self, folder: Path, fraction: float, setting: str = "data.max_bad_fraction") -> None:
        self.setting = setting
        """Name of the setting that `fraction` comes from."""
        self.fraction = fraction
        """Largest allowed share of bad rows."""
        self.rows = self.count = 0
        """Numbers of rows read, and of bad rows among them."""
        self.first: list[str] = []
        """Messages of the first few bad rows."""
        self._path = folder / BAD_ROWS
        self._file: IO[str] | None = None

    def resume(self, rows: int, count: int, first: list[str], size: int) -> None:
        """Continue after `rows` rows, `count` of them bad; cut the file to `size` bytes."""
        self.rows, self.count, self.first = rows, count, list(first)
        if self._path.exists():
            os.truncate(self._path, size)

    def size(self) -> int:
        """Flush the file, and return its size in bytes."""
        if self._file is not None:
            self._file.flush()
        return self._path.stat().st_size if self._path.exists() else 0

    def add(self, where: str, error: DataError) -> None:
        """Record one bad row.

        Raises:
            DataError: no row may be bad; this is `error` itself.
        """
        if not self.fraction:
            raise error
        if self._file is None:
            logger.warning(
                "%s; the row is skipped and recorded in %s, as %s allows", error, BAD_ROWS, self.setting
            )
            self._file = self._path.open("a", encoding="utf-8")
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(str(error))
        self._file.write(json.dumps(BadRow.of(where, error).model_dump()) + "\n")

    def check(self, done: bool = True) -> None:
        """Check the share of bad rows; before all rows are read (`done`), against a more generous limit.

        Raises:
            DataError: there are too many bad rows; the message has their number, the first reasons, and the
                file with all.
        """
        rows = self.rows
        allowed = int(self.fraction * rows + 1e-9)  # 0.29 * 100 is 28.999...
        if self.count <= (allowed if done else rows * max(self.fraction, 0.5) + _GRACE_ROWS / 2):
            return
        first = "\n".join(f"  {reason}" for reason in self.first)
        so_far = "" if done else " so far"
        raise DataError(
            f"{self.count} of {counted(rows, 'row')}{so_far} {'is' if self.count == 1 else 'are'} bad, more "
            f"than {self.setting} {self.fraction} allows ({allowed}); all of them are listed in "
            f"{self._path}. The first:\n"
            f"{first}"
        )

    @contextmanager
    def opened(self) -> Iterator["BadRows"]:
        """Close the file at the end of the block."""
        try:
            yield self
        finally:
            if self._file is not None:
                self._file.close()
