"""`flytune approve ARTIFACT`."""

import argparse
import sys
from getpass import getuser
from pathlib import Path

from flytune.errors import ExportError, printable
from flytune.registry import approval


def run(options: argparse.Namespace) -> int:
    """Answer the question about a stored artifact: publish and accept it, or refuse it for a reason."""
    address = options.artifact if "://" in options.artifact else str(Path(options.artifact).absolute())
    found = approval.recorded(address)
    if found is None:
        raise ExportError(f"{address}: nobody was asked about it: a run asks whose recipe has publish.approval")
    words = "yes" if options.refuse is None else f"no: {options.refuse}"
    sha256 = options.sha256 or found.question.artifact_sha256
    settled = approval.settle(address, sha256, words, options.by or getuser())
    sys.stdout.write(f"{printable(settled.text)}\n")
    return 0
