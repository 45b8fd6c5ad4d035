"""Numbers, and texts of libraries, in sentences."""

import re
from collections.abc import Sequence


def counted(count: float, singular: str, many: str = "") -> str:
    """Return a number with its noun: "1 file", "2,112 files"; `many` is the noun, with its verb, of other
    numbers than 1.

    By default `many` is `one` with an s: counted(1, "row is bad", "rows are bad").
    """
    return f"{count:,} {singular if count == 1 else many or singular + 's'}"


def counted_of(count: int, whole: int, noun: str, singular: str, many: str) -> str:
    """Return a share of a number with its verb, "1 of 5 rows is": with the verb for 1 and for others."""
    return f"{count:,} of {counted(whole, noun)} {singular if count == 1 else many}"


def sharers(groups: int, processes: int) -> str:
    """Return who share a batch: "4 processes", or "4 groups of 2 processes"."""
    if processes == 1:
        return counted(groups, "process", "processes")
    return f"{counted(groups, 'group')} of {counted(processes, 'process', 'processes')}"


def enumerated(names: Sequence[str]) -> str:
    """Return several names in a sentence: "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def at_revision(name: str, revision: str | None) -> str:
    """Return the name of a repository with its revision, if it has one: "org/model@main"."""
    return f"{name}@{revision}" if revision else name


def one_line(text: object) -> str:
    """Return 300 characters of a library's text in one line, in which a class is its name: `float` instead of
    `<class 'float'>`."""
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", " ".join(str(text).split()))[:300]
