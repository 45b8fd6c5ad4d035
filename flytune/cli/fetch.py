"""`flytune fetch`: a published artifact into a folder."""

import argparse
from pathlib import Path

from rich.console import Console

from flytune import fetching


def run(options: argparse.Namespace) -> int:
    """Fetches and checks it."""
    fetching.fetch(options.address, Path(options.out))
    Console().print(f"{options.out}: {options.address}, every file as its artifact.json says", highlight=False, soft_wrap=True)
    return 0
