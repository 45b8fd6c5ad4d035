"""`flytune calibrate DIR...`."""

import argparse
from pathlib import Path

from flytune import calibration, plan_table, tables
from flytune.errors import RecipeError


def run(options: argparse.Namespace) -> int:
    """Shows measured over planned, and keeps a factor per shape."""
    comparisons = calibration.found([Path(folder) for folder in options.artifacts])
    rows = calibration.factors(comparisons)
    plan_table.show_calibration(comparisons, rows, tables.console())
    if not rows:
        raise RecipeError("nothing to learn from: only runs with data.packing or training.probe_longest are as long as planned")
    calibration.write(rows)
    return 0
