"""Patterns of files: `data/*.jsonl` in a path, and the names that `exclude` leaves out of a folder."""

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path


def divided(path: str) -> tuple[str, str]:
    """Return the folder before the first pattern in a path or an address, and the rest, which is empty
    without one.

    `**` stands for any folders. An existing path is not a pattern, and in an address only `*` makes one.
    """
    is_address = "://" in path and not path.startswith("file://")
    if not (found := re.search(r"\*" if is_address else r"[*?\[]", path)):
        return path, ""
    if not is_address and os.path.lexists(Path(path.removeprefix("file://")).expanduser()):
        return path, ""
    folder, _, rest = path[: found.start()].rpartition("/")
    rest += path[found.start() :]
    return folder or ("/" if path.startswith("/") else "."), rest


class Wanted:
    """Choice of the files of a folder: those of a pattern (empty: all) that no pattern of `exclude`
    matches."""

    def __init__(self, pattern: str, exclude: Sequence[str]) -> None:
        self._pattern = _parts(pattern)
        # A pattern without a slash is a name anywhere; of all others the beginning is that of the folder.
        self._exclude = {one: _parts(one if "/" in one.strip("/") else f"**/{one}") for one in exclude}
        self.unused = dict.fromkeys(exclude)
        """Patterns of `exclude` that have matched nothing yet."""

    def has(self, name: str, is_folder: bool = False) -> bool:
        """Return whether a file below the folder is wanted, or a folder in it may have such files."""
        parts = name.split("/")
        for written, pattern in self._exclude.items():
            if _matches(parts, pattern):
                self.unused.pop(written, None)
                return False
        return not self._pattern or _begins(parts, self._pattern) if is_folder else self._is_chosen(parts)

    def _is_chosen(self, parts: list[str]) -> bool:
        """Return whether the pattern matches a file, or a folder that it is in."""
        return not self._pattern or any(
            _matches(parts[:end], self._pattern) for end in range(1, len(parts) + 1)
        )


def _parts(pattern: str) -> list[str]:
    """Return the names in a pattern; a row of `**` is one, so that matching stays short."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    return [part for at, part in enumerate(parts) if part != "**" or parts[at - 1 : at] != ["**"]]


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Return whether a path is matched as a whole: by a table, since several `**` would take long by
    trial."""
    reached = {0}
    for part in [*parts, None]:
        for at in sorted(reached):
            while at < len(pattern) and pattern[at] == "**":
                at += 1
                reached.add(at)
        if part is None:
            break
        reached = {
            at if pattern[at] == "**" else at + 1
            for at in reached
            if at < len(pattern) and (pattern[at] == "**" or fnmatchcase(part, pattern[at]))
        }
    return len(pattern) in reached


def _begins(parts: list[str], pattern: list[str]) -> bool:
    """Return whether a folder may have files that the pattern matches, or is matched itself."""
    end = next((at for at, part in enumerate(pattern) if part == "**"), len(pattern))
    return all(fnmatchcase(part, wanted) for part, wanted in zip(parts, pattern[:end], strict=False))
