import threading
import time

import pytest

from flytune.errors import Hang
from flytune.records.plan import EVALUATE, FIRST_STEP, STEP
from flytune.training import watchdog
from flytune.training.measurements import Peaks
from flytune.training.watchdog import Watch


def test_the_limit_grows_with_the_slowest_step_and_is_larger_in_other_phases(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watchdog, "now", lambda: now[0])
    watch = Watch(10.0)
    run = Peaks([watch.enter])
    assert watch.limit() == 3600
    run.enter(FIRST_STEP)
    assert watch.limit() == 1800
    now[0] = 500
    watch.end_step(1)
    run.enter(STEP)
    assert watch.limit() == 600
    for step in (2, 3):
        now[0] += 90
        watch.end_step(step)
    assert watch.limit() == 900
    with run.during(EVALUATE):
        assert watch.limit() == 3600
        now[0] += 3000
    now[0] += 50
    watch.end_step(4)
    assert watch.limit() == 900, "an evaluation is not a step"


def test_the_process_group_waits_longer_than_any_limit():
    assert watchdog.process_group_seconds(10.0) == 3600 + 300


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Let the process live until its main thread has seen the signal, and look at the clock often."""
    monkeypatch.setattr(watchdog, "SECONDS_FOR_OTHERS", 600.0)
    monkeypatch.setattr(watchdog, "PAUSE", 0.001)


def test_a_wait_of_the_main_thread_is_interrupted_and_reported(capfd, monkeypatch):
    waits, clock = threading.Event(), iter(range(0, 10**6, 30))
    # Half a minute passes at each look when the main thread waits.
    monkeypatch.setattr(watchdog, "now", lambda: float(next(clock)) if waits.is_set() else 0.0)
    said = r"nothing finished for 36\d0 s in load, after step 0 .*:\n(.*\n)*.*time.sleep\(600\)"
    with pytest.raises(Hang, match=said), Watch(10.0):
        waits.set() or time.sleep(600)
    assert "Current thread" in capfd.readouterr().err


def test_a_stopped_process_does_not_hang(monkeypatch):
    clock, looks = [0.0], threading.Semaphore(0)

    def now():
        if threading.current_thread() is not threading.main_thread():
            looks.release()
        return clock[0]

    monkeypatch.setattr(watchdog, "now", now)
    with Watch(10.0):
        # The first look is before the stop, the second after it, the third finds no hang.
        for seconds in (0, 3601, 0, 0):
            assert looks.acquire(timeout=600)
            clock[0] += seconds


def test_a_run_that_proceeds_is_not_interrupted(monkeypatch):
    clock, looked = [0.0], threading.Event()

    def now():
        if threading.current_thread() is not threading.main_thread():
            looked.set()
        return clock[0]

    monkeypatch.setattr(watchdog, "now", now)
    with Watch(10.0) as watch:
        for step in range(100):
            clock[0] += 50
            looked.clear()
            assert looked.wait(600)
            watch.end_step(step)
