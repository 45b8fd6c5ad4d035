"""Tests of the process of this machine that runs the stages of a local run."""

import os
import signal
import subprocess
import sys

import pytest

from flytune.errors import DataError
from flytune.stages import calls
from flytune.stages.ranks import StageFailed
from flytune.stages.worker import Worker
from tests.support.paths import ROOT


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.end()


def bad():
    raise DataError("rows.jsonl: line 3: no text")


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def test_one_process_runs_all_calls_in_its_main_thread(worker):
    first = worker.call(os.getpid)
    assert first not in (os.getpid(), None)
    assert worker.call(os.getpid) == first
    # Handlers of signals can be set in the main thread only.
    assert worker.call(signal.signal, signal.SIGUSR1, signal.SIG_IGN) == signal.SIG_DFL


def test_an_error_is_classified_and_the_process_goes_on(worker):
    with pytest.raises(StageFailed) as failed:
        worker.call(bad)
    assert (failed.value.failure.kind, failed.value.failure.recoverable) == ("bad data", False)
    assert "rows.jsonl: line 3: no text" in str(failed.value)
    assert worker.call(os.path.basename, "a/b") == "b"


def test_a_killed_process_is_a_failure_that_another_attempt_may_overcome(worker):
    first = worker.call(os.getpid)
    with pytest.raises(StageFailed) as failed:
        worker.call(end)
    assert failed.value.failure.recoverable
    assert "SIGKILL" in failed.value.failure.message
    assert worker.call(os.getpid) != first


class Interrupting:
    """Result at which a Ctrl-C comes while it is sent."""

    def __reduce__(self):
        raise KeyboardInterrupt


def test_a_ctrl_c_between_two_stages_is_the_parents_to_speak_of(worker, monkeypatch, capfd):
    with pytest.raises(StageFailed):
        worker.call(Interrupting)
    assert worker.exit_code == 0
    assert capfd.readouterr().err == ""
    shown = []
    monkeypatch.setattr(calls, "show_saved", lambda *arguments: shown.append(arguments))
    with pytest.raises(SystemExit, match="130"):
        calls.leave(worker, signal.SIGINT, "here", "recipe", stage_has_recipe=True)
    assert shown == [("here", "recipe", "Ctrl-C")]


def test_it_ends_with_the_process_that_started_it():
    code = (
        "import os; from flytune.stages.worker import Worker\n"
        "print(Worker().call(os.getpid), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    # It has the other end of the pipe: reading ends when it has ended.
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=300
    )
    assert done.returncode == -signal.SIGKILL
    assert int(done.stdout) > 0
