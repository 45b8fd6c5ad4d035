"""A stand-in for the kubelet and for Kubeflow's training operator: pods that live and end as theirs do.

A container's command is PID 1 of a PID namespace of its own (`unshare`), where the kernel hands on no signal that it has no
handler for; or a child of the pause process, where the pod's containers share one. SIGTERM goes to that command alone, SIGKILL
to all. An elastic PyTorchJob has succeeded as soon as one of its pods has (operator 1.8, pytorchjob_controller.go), failed as
soon as one has; those that still run then are deleted (cleanPodPolicy: Running).
"""

import functools
import os
import signal
import subprocess
import time
from pathlib import Path

_NAMESPACE = ["unshare", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child"]
_NAME = 'echo "$0" > /proc/sys/kernel/hostname && '
_COMMAND = ["sh", "-c", f'{_NAME} exec "$@"']
# PID 1 runs the command and waits for it, as the runtime does; itself it does nothing.
_PAUSE = ["sh", "-c", f'{_NAME} "$@"; exit $?']


@functools.cache
def has_namespaces():
    """Tell whether this machine lets its user have PID namespaces."""
    try:
        return subprocess.run([*_NAMESPACE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


class Pod:
    """A pod of one container, from now on. `index` numbers the pods of a job."""

    def __init__(self, command, folder, environment, log, index=0, shares_processes=False, grace=60.0):
        self.log, self.grace = log, grace
        # Without namespaces no command is PID 1.
        self._above = has_namespaces() * (1 + shares_processes)
        # A name that other pods reach, too: torchelastic takes nodes of the same name and process id for one.
        around = has_namespaces() * [*_NAMESPACE, *(_PAUSE if shares_processes else _COMMAND), f"127.0.0.{index + 2}"]
        with log.open("a") as out:
            self._process = subprocess.Popen(
                [*around, *command], cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._deleted = None

    @property
    def code(self):
        """Its exit code, negative or above 128 for a signal; None while it runs."""
        return self._process.poll()

    @property
    def was_deleted(self):
        """Tell whether it got SIGTERM while it ran."""
        return self._deleted is not None

    def said(self):
        """Its log."""
        return self.log.read_text(errors="replace")

    def delete(self):
        """SIGTERM, as for a pod that is deleted or a node that is drained; after the grace period `expire` kills it."""
        if self._deleted is None and self.code is None:
            self._deleted = time.monotonic()
            self.send(signal.SIGTERM)

    def send(self, number):
        """A signal to the container's command."""
        if (pid := self._command()) is not None:
            os.kill(pid, number)

    def expire(self):
        """SIGKILL to all, where the grace period is over."""
        if self.code is None and self._deleted is not None and time.monotonic() > self._deleted + self.grace:
            self.kill()

    def kill(self):
        """SIGKILL to all."""
        if self.code is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _command(self):
        """Process id of the container's command, as seen from here; None once it has ended."""
        pid = self._process.pid
        for _ in range(self._above):
            deadline = time.monotonic() + 10
            while not (found := _children(pid)):
                if self.code is not None:
                    return None
                assert time.monotonic() < deadline, "the container's command does not start"
                time.sleep(0.01)
            pid = found[0]
        return pid


def _children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def run(pods, strike=None, seconds=900):
    """Waits until the job of these pods is over, and returns its condition. `strike` is called with them, again and again."""
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
    raise AssertionError(f"not over after {seconds} s; the first pod's log:\n{pods[0].said()[-3000:]}")


def end(pods, grace=None):
    """Deletes those that still run, as the operator does once a job is over, and returns when all have ended."""
    for pod in pods:
        pod.grace = pod.grace if grace is None else grace
        pod.delete()
    while any(pod.code is None for pod in pods):
        for pod in pods:
            pod.expire()
        time.sleep(0.05)
