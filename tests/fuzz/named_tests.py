"""Tests that docs/security.md names beside a protection: each fails when the protection is removed."""

import os
import re
import subprocess
import sys
from typing import NamedTuple

from tests.fuzz import removed
from tests.fuzz.removals import REMOVALS
from tests.fuzz.removing import Removal
from tests.support.paths import ROOT

_SECONDS = 300.0
"""Time that the tests of a protection take without it, at most; with it they take seconds."""


class Holder(NamedTuple):
    """File with protections, and the tests that the page names beside it."""

    file: str
    tests: tuple[str, ...]


def holders() -> list[Holder]:
    """Return the files of the library with tests beside them, in the order of the page."""
    lines = (ROOT / "docs/security.md").read_text(encoding="utf-8").splitlines()
    holders = []
    for cell in (line.split("|")[4] for line in lines if line.startswith("| ")):
        tests = tuple(re.findall(r"`(tests/[\w/]+\.py)", cell))
        holders += [
            Holder(file, tests)
            for file in re.findall(r"`((?:flytune|tasks|training_estimates)/[\w/]+\.py)", cell)
            if tests
        ]
    return holders


def first_noticed(holder: Holder) -> Removal | None:
    """Return the first protection of a file whose removal makes one of the named tests fail; None if none
    does."""
    return next(
        (removal for removal in REMOVALS if removal.held_by == holder.file and _fail(holder.tests, removal)),
        None,
    )


def _fail(tests: tuple[str, ...], removal: Removal) -> bool:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        removed.__name__,
        "-m",
        "not slow and not gpu",
        *tests,
    ]
    environment = os.environ | {removed.NAME: removal.name}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        # What has no end without its limit.
        return True
    # Of pytest's exit codes, 1 is that of tests that failed.
    return done.returncode == 1
