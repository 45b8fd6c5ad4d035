"""Simulated attempts of a run, each in its own process."""

import multiprocessing
import os
import signal
import sys

import pytest

from flytune.training import AttemptWriter, earlier_attempts
from tests.support.waiting import LIMIT, until


@pytest.fixture(autouse=True)
def execution(monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["pyflyte-execute", "--", "task-module", "tasks.train", "task-name", "train_l4_1"]
    )
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "abc")


def run(place, attempt, phase, end, saved_step, node, execution, action):
    os.environ["FLYTUNE_ACTION"] = action
    os.environ |= {
        "FLYTE_ATTEMPT_NUMBER": str(attempt),
        "GROUP_RANK": str(node),
        "FLYTE_INTERNAL_EXECUTION_ID": execution,
    }
    signalled = []
    mine = AttemptWriter(place, is_signalled=lambda: bool(signalled))
    with mine.keeping(lambda: saved_step):
        mine.enter(phase)
        if end == "SIGTERM":
            signalled.append(True)
            until(lambda: earlier_attempts.read(place, execution)[-1].kind)
        if isinstance(end, Exception):
            raise end
        if end != "done":
            os.kill(os.getpid(), signal.SIGKILL)


def attempt(place, number, phase="load", end="killed", saved_step=0, node=0, execution="abc", action=""):
    """Run one attempt in another process; return its exit code."""
    one = multiprocessing.get_context("fork").Process(
        target=run, args=(str(place), number, phase, end, saved_step, node, execution, action)
    )
    one.start()
    one.join(LIMIT)
    return one.exitcode
