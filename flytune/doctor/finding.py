"""One line of a doctor's report."""

from typing import Literal

from flytune.schema import Strict

Level = Literal["OK", "WARN", "FAIL"]

NO_CLUSTER = (
    "start Flyte's sandbox with `flytectl demo start` (it needs docker), and then "
    "`export FLYTECTL_CONFIG=~/.flyte/config-sandbox.yaml`; of a cluster that you have: `flytectl config init --host=HOST`"
)
"""For a user without one."""


class Finding(Strict):
    """What was looked at, what is so, and what to do."""

    level: Level
    """FAIL: a run will not work. WARN: it may not, or not all of it."""
    what: str
    said: str
    do: str = ""
    """Empty where nothing needs doing."""


def ok(what: str, said: str) -> Finding:
    """Nothing to do."""
    return Finding(level="OK", what=what, said=said)


def warn(what: str, said: str, do: str) -> Finding:
    """Perhaps something to do."""
    return Finding(level="WARN", what=what, said=said, do=do)


def fail(what: str, said: str, do: str) -> Finding:
    """Something to do before a run."""
    return Finding(level="FAIL", what=what, said=said, do=do)
