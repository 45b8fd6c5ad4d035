"""The lock of a run: what a second one is told, and that neither a dead process nor its children block
anything."""

import os
import re
import signal
import subprocess
import sys

import pytest

from flytune.errors import TrainingError
from flytune.training import running_lock

HOLD = """
import os, sys, time
from flytune.training import running_lock

with running_lock.held(sys.argv[1]):
    child = os.fork()
    if child == 0:
        time.sleep(600)
    print(child, flush=True)
    time.sleep(600)
"""


def test_a_second_run_is_told_of_the_first_and_a_dead_one_blocks_nothing(tmp_path):
    address = str(tmp_path / "checkpoints" / "tiny-0a")
    command = [sys.executable, "-c", HOLD, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        child = int(first.stdout.readline())
        try:
            with pytest.raises(TrainingError) as caught, running_lock.held(address):
                pass
            told = (
                rf"{address}: another run of this recipe and data trains there: process {first.pid} on "
                rf"\S+, since \d{{4}}-"
            )
            assert re.match(told, str(caught.value))
            assert "it is alive, as it holds the lock" in str(caught.value)
            assert "give this one a checkpoints.name of its own" in str(caught.value)
            first.kill()
            first.wait()
            with running_lock.held(address):
                pass
        finally:
            first.kill()
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("variable", [{"RANK": "1"}, {"FLYTE_INTERNAL_EXECUTION_ID": "f0"}, {}])
def test_other_ranks_executions_and_stores_have_no_lock(variable, tmp_path, monkeypatch):
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    with running_lock.held(str(tmp_path / "tiny") if variable else "memory://bucket/tiny"):
        assert list(tmp_path.iterdir()) == []
