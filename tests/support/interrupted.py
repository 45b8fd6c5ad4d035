"""Runs that get Ctrl-C as a terminal sends it: SIGINT to the whole process group."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from tests.support.paths import ROOT

SECONDS = 600


def start(arguments, folder, seen=None):
    """Start `flytune` in a process group of its own; return it, and the file with what it prints on both streams."""
    (folder / "tmp").mkdir(exist_ok=True)
    environment = os.environ | {"HOME": str(folder), "TMPDIR": str(folder / "tmp"), **(seen or {})}
    log = folder / f"log-{len(list(folder.glob('log-*')))}.txt"
    command = [sys.executable, "-m", "flytune.cli", *map(str, arguments)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    return process, log


def run(recipe, folder, until=None, times=1, options=(), seen=None):
    """Run a recipe, with Ctrl-C when a line matches `until`, pressed `times`; return the exit code and what was printed.

    `seen` has additional environment variables.
    """

    def press(process):
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT)

    return signalled(recipe, folder, until, press, options, seen)


def signalled(recipe, folder, until, send, options=(), seen=None):
    """Run a recipe and call `send` with the process when a line matches `until`; return the exit code and what was printed."""
    path = Path(folder, "recipe.yaml")
    path.write_text(yaml.safe_dump(recipe))
    process, log = start(["run", path, *options], folder, seen)
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
