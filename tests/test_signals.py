"""Signal handlers that raise exceptions: logging's locks are free afterwards."""

import logging
import operator
import signal
import threading
from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest

from flytune import process_setup


class _Ended(Exception):
    pass


def _end(number, frame):
    raise _Ended


def _is_free(lock):
    acquired = []
    thread = threading.Thread(target=lambda: acquired.append(lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    return acquired == [True]


def test_an_exception_does_not_leave_logging_locked(monkeypatch):
    lock = threading.RLock()
    # In C alone, as the lock itself is, so that logging's function is the one that the signal interrupts.
    calls = map(operator.call, [lock.acquire, partial(signal.raise_signal, signal.SIGUSR1)])
    monkeypatch.setattr(
        logging, "_lock", SimpleNamespace(acquire=partial(deque, calls, 0), release=lock.release)
    )
    before = signal.signal(signal.SIGUSR1, process_setup.outside_logging(_end))
    try:
        with pytest.raises(_Ended):
            logging.Logger("interrupted").isEnabledFor(logging.DEBUG)
            threading.Event().wait(60)
    finally:
        signal.signal(signal.SIGUSR1, before)
        monkeypatch.undo()
    assert _is_free(lock)


@pytest.mark.parametrize("function", ["emit", "flush"])
def test_a_write_of_logging_is_interrupted_at_once(function):
    # It may wait for whoever reads the output.
    code = _end.__code__.replace(co_filename=logging.__file__, co_name=function)
    with pytest.raises(_Ended):
        process_setup.outside_logging(_end)(signal.SIGUSR1, SimpleNamespace(f_code=code))
