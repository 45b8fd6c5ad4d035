"""`flytune fetch`: a stored or published artifact into a folder."""

import argparse
from pathlib import Path

from rich.console import Console

from flytune.artifacts import executions, fetch


def run(options: argparse.Namespace) -> int:
    """Fetches and checks it."""
    address, place = options.address, None
    execution = executions.named(address, options.project, options.domain) if not Path(address).exists() else None
    if execution is not None:
        address, place = executions.place(execution)
    fetch.fetch(address, Path(options.out), place)
    Console().print(f"{options.out}: {address}, every file as its artifact.json says", highlight=False, soft_wrap=True)
    return 0
