"""`flytune selftest`."""

import argparse
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from flytune.cli import print_error
from flytune.console import tables
from flytune.selftest import RankFailed, matrix, table


def run(options: argparse.Namespace) -> int:
    """Show the matrix; return 1 if a pair differs."""
    pairs = matrix.pairs_named(options.pairs)
    # The runs are forks of this process, so tqdm must not start its monitor thread.
    tqdm.monitor_interval = 0
    with tempfile.TemporaryDirectory() as folder, tqdm(total=len(pairs), desc="imports, model and data", unit=" pairs") as bar:

        def advance(cell: matrix.Cell) -> None:
            bar.set_description(f"{cell.method} {cell.sharding} {cell.words}", refresh=False)
            bar.update()

        try:
            filled = matrix.fill(Path(options.keep or f"{folder}/selftest"), pairs, advance)
        except RankFailed as error:
            return print_error(error)
    if options.json:
        sys.stdout.write(filled.model_dump_json(indent=2) + "\n")
    else:
        table.show(filled, tables.console())
    return 0 if filled.is_good else 1
