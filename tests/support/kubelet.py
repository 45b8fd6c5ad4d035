"""Stand-in for the kubelet and for Kubeflow's training operator: local processes with the life cycle of pods.

A container's command is PID 1 of its own PID namespace (`unshare`), where the kernel delivers no signal
without a handler; or a child of the pause process, if the pod's containers share a namespace. SIGTERM goes to
that command only, SIGKILL to all. An elastic PyTorchJob succeeds or fails as soon as one of its pods does
(operator 1.8, pytorchjob_controller.go); pods that still run are deleted (cleanPodPolicy: Running).
"""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.fork_server import Program
from tests.support.paths import ROOT
from tests.support.waiting import LIMIT

_NAMESPACE = ["unshare", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child"]
_NAME = 'echo "$0" > /proc/sys/kernel/hostname && '
_COMMAND = ["sh", "-c", f'{_NAME} exec "$@"']
# PID 1 only runs the command and waits for it.
_PAUSE = ["sh", "-c", f'{_NAME} "$@"; exit $?']
_EXECUTE = ROOT / "images" / "fast_execute.py"
"""The images' pyflyte-fast-execute."""


@functools.cache
def has_namespaces():
    """Return True if this machine allows PID namespaces."""
    try:
        return subprocess.run([*_NAMESPACE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


class Pod:
    """Started pod of one container; `index` is its number in the job.

    One that `forks` begins with its libraries (fork_server.py), and executes its task in the process that
    fetched the code.
    """

    def __init__(
        self, command, folder, environment, log, index=0, shares_processes=False, grace=60.0, forks=False
    ):
        self.log, self.grace = log, grace
        # Without namespaces no command is PID 1.
        self._above = has_namespaces() * (1 + shares_processes)
        # A host name that other pods can reach: torchelastic takes nodes with the same name and process id
        # for one.
        host = f"127.0.0.{index + 2}"
        around = has_namespaces() * [*_NAMESPACE, *(_PAUSE if shares_processes else _COMMAND), host]
        with log.open("a") as out:
            if forks:
                own = host if has_namespaces() else None
                fetches = command[0] == "pyflyte-fast-execute"
                file = _EXECUTE if fetches else Path(sys.executable).with_name(command[0])
                self._process = Program(file, command, folder, environment, out, own, shares_processes)
            else:
                self._process = subprocess.Popen(
                    [*around, *command],
                    cwd=folder,
                    env=environment,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        self._deleted = None
        self.was_drained = False

    @property
    def code(self):
        """Exit code, negative or above 128 for a signal; None while the pod runs."""
        code = self._process.poll()
        return 1 if code == 0 and self.was_drained else code

    @property
    def was_deleted(self):
        """True if the pod got SIGTERM while it ran."""
        return self._deleted is not None

    def log_text(self):
        """Return the text of the log."""
        return self.log.read_text(errors="replace")

    def delete(self):
        """Send SIGTERM, as when a pod is deleted or a node is drained; `expire` kills the pod after the grace
        period."""
        if self._deleted is None and self.code is None:
            self._deleted = time.monotonic()
            self.send(signal.SIGTERM)

    def drain(self):
        """Delete the pod as its node is drained: the operator then counts its replica as failed, whatever it
        exits with."""
        self.was_drained = True
        self.delete()

    def send(self, number):
        """Send a signal to the container's command."""
        if (pid := self._command()) is not None:
            os.kill(pid, number)

    def expire(self):
        """Kill all processes if the grace period has ended."""
        if self.code is None and self._deleted is not None and time.monotonic() > self._deleted + self.grace:
            self.kill()

    def kill(self):
        """Kill all processes."""
        if self.code is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _command(self):
        """Return the process id of the container's command in this namespace; None once it has ended."""
        pid = self._process.pid
        for _ in range(self._above):
            deadline = time.monotonic() + LIMIT
            while not (children := _children(pid)):
                if self.code is not None:
                    return None
                assert time.monotonic() < deadline, "the container's command did not start"
                time.sleep(0.01)
            pid = children[0]
        return pid


def _children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def run(pods, strike=None, seconds=900):
    """Wait until the job of these pods has ended; return its condition. `strike` is called repeatedly with
    the pods."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if strike is not None:
            strike(pods)
        codes = [pod.code for pod in pods]
        if 0 in codes:
            return "Succeeded"
        if any(codes):
            return "Failed"
        for pod in pods:
            pod.expire()
        time.sleep(0.05)
    raise AssertionError(
        f"the job has not ended after {seconds} s; the first pod's log:\n{pods[0].log_text()[-3000:]}"
    )


def end(pods, grace=None):
    """Delete running pods, as the operator does once a job has ended; return when all have ended."""
    for pod in pods:
        pod.grace = pod.grace if grace is None else grace
        pod.delete()
    while any(pod.code is None for pod in pods):
        for pod in pods:
            pod.expire()
        time.sleep(0.05)
