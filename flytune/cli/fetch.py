"""`flytune fetch ADDRESS OUT`."""

import argparse
from pathlib import Path

from rich.console import Console

from flytune.artifacts import executions, fetch
from flytune.errors import printable


def run(options: argparse.Namespace) -> int:
    """Download an artifact, and verify its files."""
    address, reader = options.address, None
    execution = executions.parse(address, options.project, options.domain) if not Path(address).exists() else None
    if execution is not None:
        address, reader = executions.find_artifact(execution)
    fetch.fetch(address, Path(options.out), reader)
    said = printable(f"{options.out}: {address}, all files verified against artifact.json")
    Console(emoji=False).print(said, markup=False, highlight=False, soft_wrap=True)
    return 0
