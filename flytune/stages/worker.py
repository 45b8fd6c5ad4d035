"""Process of this machine in which the stages of a local run are run one after the other, as in a pod each.

What an orchestrator's own process runs beside them (event loops, threads) would disturb training: torch has a
pool of threads for each thread that computes, and the pools wait for each other on the same cores.
"""

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from flytune import process_setup
from flytune.console import output
from flytune.failures import reports
from flytune.stages.ranks import StageFailed

_SERVE = (
    "import sys; sys.path[:] = {path!r}; from flytune.stages import worker; worker.serve({handle}, {parent})"
)
SECONDS_TO_END = 60.0
"""Longest wait for a worker after a Ctrl-C, in which it says what is saved."""


class Stopped(Exception):
    """Refusal of a call, because the run ends by a signal."""


class Worker:
    """A process that is started at its first call, and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._stops = False
        self.exit_code: int | None = None
        """Exit code of the last process that has ended; None before."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function that can be imported, which runs in the process's main thread.

        Raises:
            StageFailed: its failure, or that of a process that was killed.
            Stopped: `stop` was called before.
        """
        with self._lock:
            if self._stops:
                raise Stopped
            connection = self._started()
            connection.send((function, arguments))
            try:
                succeeded, result = connection.recv()
            except EOFError:
                raise StageFailed(reports.of_exit(self._ended(), rank=0)) from None
        if not succeeded:
            raise StageFailed(result)
        return result

    def stop(self, number: int | None = None) -> None:
        """End the process and start no other; a call that another thread waits for may end by itself before.

        Args:
            number: signal that the process is sent; None if it has got one itself, as at a Ctrl-C.
        """
        self._stops = True
        process = self._process
        if number is not None and process is not None:
            process.send_signal(number)
        if self._lock.acquire(timeout=SECONDS_TO_END):
            self.end()
            self._lock.release()
        elif process is not None:
            process.kill()

    def end(self) -> None:
        """End the process, if there is one; after a Ctrl-C it ends by itself."""
        if self._process is None:
            return
        assert self._connection is not None
        self._connection.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._ended()

    def _started(self) -> Connection:
        if self._connection is not None:
            return self._connection
        ours, other = socket.socketpair()
        with other:
            code = _SERVE.format(path=sys.path, handle=other.fileno(), parent=os.getpid())
            with _without_ctrl_c():
                self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[other.fileno()])
        self._connection = Connection(ours.detach())
        return self._connection

    def _ended(self) -> int:
        """Return the exit code of the process that has ended, and forget it."""
        assert self._process is not None
        self.exit_code = self._process.wait()
        self._process = self._connection = None
        return self.exit_code


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Block SIGINT in this thread, and in a process that it starts until that unblocks it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def serve(handle: int, parent: int) -> None:
    """Run what the parent process sends until it closes the connection or ends, or a Ctrl-C comes; what
    runs then says what is saved, and exits with another code."""
    _end_with(parent)
    process_setup.skip_at_exit()
    output.install()
    # torch's report of a failed rank: ours names the rank that failed first, and has the traceback of a bug.
    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn"):
        logging.getLogger(name).disabled = True
    with Connection(handle) as connection, suppress(EOFError, KeyboardInterrupt):
        # Blocked by the parent until here, so that no traceback of a half imported module is shown.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while True:
            function, arguments = connection.recv()
            connection.send_bytes(pickle.dumps(_outcome(function, arguments)))


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    """Return whether a function succeeds, and its result or its failure."""
    try:
        return True, function(*arguments)
    except StageFailed as failed:
        return False, failed.failure
    except Exception as error:  # noqa: BLE001 (raised again in the parent)
        return False, reports.of_error(error, rank=0)


def _end_with(parent: int) -> None:
    """End this process when the parent does: SIGTERM, at which ranks end too, and SIGKILL where that does not
    help.

    Not Linux's signal at the end of a parent: it comes at the end of the thread that has started this
    process.
    """

    def watch() -> None:
        for number, wait in ((signal.SIGTERM, SECONDS_TO_END), (signal.SIGKILL, 0.0)):
            while os.getppid() == parent:
                time.sleep(1)
            os.kill(os.getpid(), number)
            time.sleep(wait)

    threading.Thread(target=watch, name="parent", daemon=True).start()
