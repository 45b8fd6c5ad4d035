"""Command `flytune reproduce`, and its findings."""

import subprocess
import sys

from tests.support.paths import ROOT


def results(found):
    return {finding.name: finding.result for finding in found.findings}


def reproduce(*arguments):
    command = [sys.executable, "-m", "flytune.cli", "reproduce", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
