"""Tests of signals that come while the main thread waits in a library."""

import multiprocessing
import signal
import subprocess
import sys

import pytest

from flytune.training import stopping
from flytune.training.stopping import UnheardSignals
from tests.support.paths import ROOT

# A lock of libc's that is taken twice waits for ever, as a process group does for a rank that nobody starts.
CODE = """
import ctypes, os, sys, threading
from pathlib import Path
from flytune.training import stopping
from tests.support.ranks import NOTHING_SAVED
from tests.training.test_stopping import stopper_of
stopping.UNHEARD_SECONDS = 0.1
lock, libc = ctypes.create_string_buffer(256), ctypes.CDLL(None)
call = Path(f"/proc/self/task/{threading.get_native_id()}/syscall")

def send():
    while f" {ctypes.addressof(lock):#x} " not in call.read_text():
        pass
    os.kill(os.getpid(), int(sys.argv[1]))

with stopper_of(NOTHING_SAVED, 5).listening():
    libc.pthread_mutex_lock(lock)
    threading.Thread(target=send, daemon=True).start()
    libc.pthread_mutex_lock(lock)
"""


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            signal.SIGTERM,
            "rank 0: preempted: SIGTERM after step 0: the run was still waiting to begin; no step is lost",
        ),
        (signal.SIGINT, "Ctrl-C: the run was still waiting to begin; no step of it was trained"),
    ],
)
def test_a_process_that_waits_in_a_library_ends_by_itself(number, said):
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(int(number))], cwd=ROOT, text=True, capture_output=True, timeout=300
    )
    assert (done.returncode, said in done.stderr) == (128 + number, True), done.stderr


def test_a_signal_of_a_forked_process_is_its_own(monkeypatch):
    monkeypatch.setattr(stopping, "UNHEARD_SECONDS", 0.0)
    ended = []

    def end(number):
        ended.append(number)
        raise SystemExit  # of the thread: the test goes on

    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        with UnheardSignals(end):
            child = multiprocessing.get_context("fork").Process(
                target=signal.raise_signal, args=[signal.SIGTERM]
            )
            child.start()
            child.join()
            other = multiprocessing.get_context("fork").Process(target=int)  # time for the thread to read
            other.start()
            other.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == []
    assert signal.set_wakeup_fd(-1) == -1
