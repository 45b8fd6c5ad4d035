"""`flytune gguf ARTIFACT --out FILE`."""

import argparse
import sys
from pathlib import Path

from flytune.adapters import gguf
from flytune.artifacts import fetch, opening


def run(options: argparse.Namespace) -> int:
    """Write the artifact's model as a GGUF file."""
    consent = opening.Consent(options.trust_remote_code, options.base)
    gguf.convert(fetch.local_folder(options.artifact), Path(options.out), options.outtype, options.converter, consent)
    sys.stdout.write(f"{options.out}\n")
    return 0
