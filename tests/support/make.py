"""Commands of the Makefile."""

import subprocess

from tests.support.paths import ROOT


def lines(target, *options, **variables):
    """Return the commands that make would run."""
    command = [
        "make",
        "--no-print-directory",
        "-n",
        *options,
        target,
        *(f"{name}={value}" for name, value in variables.items()),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
