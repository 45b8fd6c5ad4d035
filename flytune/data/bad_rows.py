"""Rows that cannot be trained on: the first one stops the run, or a share of them is set aside, each with its reason."""

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from flytune.errors import DataError

logger = logging.getLogger(__name__)
BAD_ROWS = "bad_rows.jsonl"
_PLACE = re.compile(r"(?P<file>.*?)(?::|, item |, row )(?P<line>\d+)", re.DOTALL)
_SHOWN = 5
_PATIENCE = 10_000
"""Rows after which a source that is bad for the most part stops the run before its end."""


class BadRows:
    """Writes bad_rows.jsonl into a folder, a line (file, line, reason) for each bad row; no file when there is none."""

    def __init__(self, folder: Path, fraction: float, setting: str = "data.max_bad_fraction") -> None:
        self.setting = setting
        """What the fraction is called where it is set."""
        self.fraction = fraction
        """Of all rows, the share that may be bad."""
        self.rows = self.count = 0
        """Of all that were read; of those that are bad."""
        self.first: list[str] = []
        """Messages of the first few."""
        self._path = folder / BAD_ROWS
        self._file: IO[str] | None = None

    def go_on(self, rows: int, count: int, first: list[str], size: int) -> None:
        """Takes up what was listed before: `count` of `rows` rows, in `size` bytes of the file; drops what came after."""
        self.rows, self.count, self.first = rows, count, list(first)
        if self._path.exists():
            os.truncate(self._path, size)

    def size(self) -> int:
        """Bytes of the file, all rows so far written out."""
        if self._file is not None:
            self._file.flush()
        return self._path.stat().st_size if self._path.exists() else 0

    def add(self, where: str, error: DataError) -> None:
        """One bad row.

        Raises:
            DataError: the error itself, where no row may be bad.
        """
        if not self.fraction:
            raise error
        if self._file is None:
            logger.warning("%s; it is set aside in %s, as %s allows", error, BAD_ROWS, self.setting)
            self._file = self._path.open("a", encoding="utf-8")
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(str(error))
        place = _PLACE.fullmatch(where)
        file, line = (place["file"], int(place["line"])) if place else (where, None)
        reason = str(error).removeprefix(where).lstrip(": ")
        self._file.write(json.dumps({"file": file, "line": line, "reason": reason}) + "\n")

    def check(self, done: bool = True) -> None:
        """Refuses a bad share that is too large; before all rows were read, only one beyond hope.

        Raises:
            DataError: how many are bad, the first reasons, and where all of them stand.
        """
        rows = self.rows
        allowed = int(self.fraction * rows + 1e-9)  # 0.29 * 100 is 28.999...
        if self.count <= (allowed if done else rows * max(self.fraction, 0.5) + _PATIENCE / 2):
            return
        first = "\n".join(f"  {reason}" for reason in self.first)
        so_far = "" if done else " so far"
        raise DataError(
            f"{self.count} of {rows} rows{so_far} are bad, more than {self.setting} {self.fraction} allows "
            f"({allowed}); all of them are listed in {self._path}. The first:\n{first}"
        )

    @contextmanager
    def opened(self) -> Iterator["BadRows"]:
        """Closes the file in the end."""
        try:
            yield self
        finally:
            if self._file is not None:
                self._file.close()
