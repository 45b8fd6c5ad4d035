"""`flytune selftest`."""

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from flytune.cli import told
from flytune.errors import RecipeError
from flytune.selftest import matrix, table
from flytune.selftest.ranks import RankFailed


def run(options: argparse.Namespace) -> int:
    """Shows the matrix; 1 where a pair differs."""
    pairs = matrix.pairs_named(options.pairs)
    if options.keep and Path(options.keep).exists():
        raise RecipeError(f"--keep {options.keep}: is there already; the self-test's files need a folder of their own")
    # No thread that refreshes: the runs are forks of this process.
    with tempfile.TemporaryDirectory() as made, Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        bar = progress.add_task("imports, model and data", total=len(pairs))
        progress.refresh()

        def tell(cell: matrix.Cell) -> None:
            progress.update(bar, advance=1, description=f"{cell.method} {cell.sharding} {cell.words}", refresh=True)

        try:
            filled = matrix.fill(Path(options.keep or f"{made}/selftest"), pairs, tell)
        except RankFailed as error:
            return told(error)
    if options.json:
        sys.stdout.write(filled.model_dump_json(indent=2) + "\n")
    else:
        table.show(filled, Console())
    return 0 if filled.is_good else 1
