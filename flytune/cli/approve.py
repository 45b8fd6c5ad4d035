"""`flytune approve ARTIFACT`."""

import argparse
import sys
from getpass import getuser
from pathlib import Path

from flytune.errors import ExportError, printable
from flytune.registry import approval


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "artifact", help="the folder or fsspec address of the stored artifact, as the run has printed it"
    )
    parser.add_argument(
        "--sha256", help="hash of the artifact that you have looked at (default: that of the run's question)"
    )
    parser.add_argument("--refuse", metavar="REASON", help="refuse it instead, for this reason")
    parser.add_argument("--by", help="your name, for the record (default: that of this machine's user)")


def run(options: argparse.Namespace) -> int:
    """Answer the question about a stored artifact: publish and accept it, or refuse it for a reason."""
    address = options.artifact if "://" in options.artifact else str(Path(options.artifact).absolute())
    request = approval.recorded(address)
    if request is None:
        raise ExportError(
            f"{address}: nobody was asked about it: a run asks whose recipe has publish.approval"
        )
    words = "yes" if options.refuse is None else f"no: {options.refuse}"
    sha256 = options.sha256 or request.question.artifact_sha256
    settled = approval.settle(address, sha256, words, options.by or getuser())
    sys.stdout.write(f"{printable(settled.text)}\n")
    return 0
