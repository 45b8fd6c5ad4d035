"""Runs that get Ctrl-C as a terminal sends it: SIGINT to the whole process group."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from tests.support.fork_server import Program
from tests.support.paths import ROOT

SECONDS = 600


def start(arguments, folder, seen=None, forks=False):
    """Start `flytune`, or pyflyte that `forks`, in a process group of its own; return it, and the file with
    what it prints."""
    (folder / "tmp").mkdir(exist_ok=True)
    environment = os.environ | {"HOME": str(folder), "TMPDIR": str(folder / "tmp"), **(seen or {})}
    log = folder / f"log-{len(list(folder.glob('log-*')))}.txt"
    command = [sys.executable, "-m", "flytune.cli", *map(str, arguments)]
    with log.open("wb") as out:
        if forks:
            pyflyte = str(Path(sys.executable).with_name("pyflyte"))
            return Program(pyflyte, [pyflyte, *map(str, arguments)], ROOT, environment, out), log
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    return process, log


def run(recipe, folder, until=None, times=1, options=(), seen=None, forks=False):
    """Run a recipe, with Ctrl-C when a line matches `until`, pressed `times`; return the exit code and what
    was printed.

    Args:
        seen: additional environment variables.
        forks: True for pyflyte, not `flytune`, which begins with its libraries (fork_server.py).
    """

    def press(process):
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT)

    return signalled(recipe, folder, until, press, options, seen, forks)


def signalled(recipe, folder, until, send, options=(), seen=None, forks=False):
    """Run a recipe and call `send` with the process when a line matches `until`; return the exit code and
    what was printed."""
    path = Path(folder, "recipe.yaml")
    path.write_text(yaml.safe_dump(recipe))
    arguments = ["run", "workflows/finetune.py", "finetune", "--recipe", path] if forks else ["run", path]
    process, log = start([*arguments, *options], folder, seen, forks)
    end = time.monotonic() + SECONDS
    try:
        while until and not re.search(until, log.read_text(), re.MULTILINE):
            assert process.poll() is None and time.monotonic() < end, log.read_text()  # noqa: PT018
            time.sleep(0.05)
        if until:
            send(process)
        return process.wait(SECONDS), log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def has_ended(group):
    """Return whether no process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False
