"""`flytune fetch`: a stored or published artifact into a folder."""

import argparse
from pathlib import Path

from rich.console import Console

from flytune.artifacts import executions, fetch


def run(options: argparse.Namespace) -> int:
    """Fetches and checks it."""
    address, reader = options.address, None
    execution = executions.parse(address, options.project, options.domain) if not Path(address).exists() else None
    if execution is not None:
        address, reader = executions.find_artifact(execution)
    fetch.fetch(address, Path(options.out), reader)
    Console().print(f"{options.out}: {address}, every file as its artifact.json says", highlight=False, soft_wrap=True)
    return 0
