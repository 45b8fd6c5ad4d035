"""`flytune selftest`."""

import argparse
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from flytune.console import error_lines, tables
from flytune.selftest import RankFailed, matrix, table


class _Bar(tqdm):  # type: ignore[misc]
    """Bar without tqdm's monitor thread: the runs are forks of this process."""

    monitor_interval = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pairs", default="", help="only these pairs, as method/sharding/offload: full/zero2,lora/zero3/cpu"
    )
    parser.add_argument("--json", action="store_true", help="print the matrix as JSON")
    parser.add_argument(
        "--keep", metavar="DIR", help="a new folder in which to keep the exports and logs of all runs"
    )


def run(options: argparse.Namespace) -> int:
    """Show the matrix; return 1 if a pair differs."""
    pairs = matrix.pairs_named(options.pairs)
    with (
        tempfile.TemporaryDirectory() as folder,
        _Bar(total=len(pairs), desc="imports, model and data", unit=" pairs") as bar,
    ):

        def advance(cell: matrix.Cell) -> None:
            bar.set_description(f"{cell.method} {cell.sharding} {cell.words}", refresh=False)
            bar.update()

        try:
            filled = matrix.fill(Path(options.keep or f"{folder}/selftest"), pairs, advance)
        except RankFailed as error:
            return error_lines.show(error)
    if options.json:
        sys.stdout.write(filled.model_dump_json(indent=2) + "\n")
    else:
        table.show(filled, tables.console())
    return 0 if filled.is_good else 1
