"""A finding: one line of the doctor's output."""

from typing import Literal

from flytune.schema import Strict

Level = Literal["OK", "WARN", "FAIL"]


class Finding(Strict):
    """The result of one check, with advice."""

    level: Level
    """FAIL: runs will not work. WARN: runs, or parts of them, may not work."""
    what: str
    """Name of the check."""
    said: str
    """Result in words."""
    do: str = ""
    """Action to take; empty if none is needed."""


def ok(what: str, said: str) -> Finding:
    """Return a finding without an action."""
    return Finding(level="OK", what=what, said=said)


def warn(what: str, said: str, do: str) -> Finding:
    """Return a finding with an action that may be needed."""
    return Finding(level="WARN", what=what, said=said, do=do)


def fail(what: str, said: str, do: str) -> Finding:
    """Return a finding with an action that is needed before a run."""
    return Finding(level="FAIL", what=what, said=said, do=do)
