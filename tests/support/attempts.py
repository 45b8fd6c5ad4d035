"""Simulated attempts of a run, each in its own process."""

import multiprocessing
import os
import signal
import sys
import time

import pytest

from flytune.training import PhaseNotes, phase_notes


@pytest.fixture(autouse=True)
def execution(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pyflyte-execute", "--", "task-module", "tasks.train", "task-name", "train_l4_1"])
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "abc")


def run(place, attempt, phase, end, saved_step, node, execution):
    os.environ |= {"FLYTE_ATTEMPT_NUMBER": str(attempt), "GROUP_RANK": str(node), "FLYTE_INTERNAL_EXECUTION_ID": execution}
    signalled = []
    mine = PhaseNotes(place, None, lambda: bool(signalled))
    with mine.attempt(lambda: saved_step):
        mine.enter(phase)
        if end == "SIGTERM":
            signalled.append(True)
            deadline = time.monotonic() + 30
            while phase_notes.read(place, execution)[0].ended is None and time.monotonic() < deadline:
                time.sleep(0.05)
        if isinstance(end, Exception):
            raise end
        if end != "done":
            os.kill(os.getpid(), signal.SIGKILL)


def attempt(place, number, phase="load", end="killed", saved_step=0, node=0, execution="abc"):
    """Run one attempt in another process; return its exit code."""
    one = multiprocessing.get_context("fork").Process(
        target=run, args=(str(place), number, phase, end, saved_step, node, execution)
    )
    one.start()
    one.join(60)
    return one.exitcode
