"""`flytune calibrate DIR...`."""

import argparse
from pathlib import Path

from flytune.console import tables
from flytune.errors import RecipeError
from flytune.planning import calibration, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifacts", nargs="+", help="folders with artifacts")


def run(options: argparse.Namespace) -> int:
    """Show measured over planned, and store a factor for each shape."""
    comparisons = calibration.found([Path(folder) for folder in options.artifacts])
    rows = calibration.factors(comparisons)
    table.show_calibration(comparisons, rows, tables.console())
    if not rows:
        raise RecipeError(
            "no usable runs: only with data.packing or training.probe_longest are batches as long as planned"
        )
    calibration.write(rows)
    return 0
