"""`flytune convert FILE`."""

import argparse
import sys
from pathlib import Path

from flytune.conversion import convert


def run(options: argparse.Namespace) -> int:
    """Print the recipe, or write it to a new file."""
    text = convert(options.file, options.gpus, options.objective)
    if options.output is None:
        sys.stdout.write(text)
        return 0
    with Path(options.output).open("x", encoding="utf-8") as file:
        file.write(text)
    sys.stdout.write(f"{options.output}\n")
    return 0
