"""`flytune schema`: the JSON schema of recipe files, for editors, and that of plans, for other programs."""

import argparse
import sys

from flytune.planning import document
from flytune.recipe import json_schema


def run(options: argparse.Namespace) -> int:
    """Print the schema."""
    if options.plan:
        sys.stdout.write(document.schema())
    else:
        sys.stdout.write(json_schema())
    return 0
