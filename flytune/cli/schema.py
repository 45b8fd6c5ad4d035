"""`flytune schema`: the JSON schema of recipe files, for editors, and that of plans, for other programs."""

import argparse
import sys

from flytune.planning import document
from flytune.recipe import json_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plan", action="store_true", help="print the schema of what `flytune plan --json` prints"
    )


def run(options: argparse.Namespace) -> int:
    """Print the schema."""
    if options.plan:
        sys.stdout.write(document.schema())
    else:
        sys.stdout.write(json_schema())
    return 0
