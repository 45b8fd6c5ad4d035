"""`flytune schema`: the JSON schema of recipe files, for editors."""

import argparse
import sys

from flytune.recipe import json_schema


def run(options: argparse.Namespace) -> int:
    """Print the schema."""
    sys.stdout.write(json_schema())
    return 0
