"""`flytune selftest`."""

import argparse
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from flytune.cli import told
from flytune.console import tables
from flytune.errors import RecipeError
from flytune.selftest import matrix, table
from flytune.selftest.processes import RankFailed


def run(options: argparse.Namespace) -> int:
    """Shows the matrix; 1 where a pair differs."""
    pairs = matrix.pairs_named(options.pairs)
    if options.keep and Path(options.keep).exists():
        raise RecipeError(f"--keep {options.keep}: is there already; the self-test's files need a folder of their own")
    # No thread that looks after bars: the runs are forks of this process.
    tqdm.monitor_interval = 0
    with tempfile.TemporaryDirectory() as made, tqdm(total=len(pairs), desc="imports, model and data", unit=" pairs") as bar:

        def tell(cell: matrix.Cell) -> None:
            bar.set_description(f"{cell.method} {cell.sharding} {cell.words}", refresh=False)
            bar.update()

        try:
            filled = matrix.fill(Path(options.keep or f"{made}/selftest"), pairs, tell)
        except RankFailed as error:
            return told(error)
    if options.json:
        sys.stdout.write(filled.model_dump_json(indent=2) + "\n")
    else:
        table.show(filled, tables.console())
    return 0 if filled.is_good else 1
