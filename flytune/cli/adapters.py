"""`flytune adapters ADDRESS`."""

import argparse
import json
import sys

from rich.table import Table

from flytune.artifacts import Entry, catalog
from flytune.console import tables
from flytune.records import MeasuredFigure
from flytune.sentences import at_revision, counted

FIGURES = 2
"""Number of figures of an artifact in the table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", help="a folder or fsspec address with artifacts")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(options: argparse.Namespace) -> int:
    """Show the artifacts in a store."""
    entries = catalog.list_artifacts(options.address)
    if options.json:
        sys.stdout.write(json.dumps([entry.model_dump(mode="json") for entry in entries], indent=2) + "\n")
        return 0
    table = Table(title=tables.plain(options.address), title_justify="left", show_lines=True)
    for title in ("artifact", "base", "method", "data", "held-out figures", "stored (UTC)"):
        table.add_column(title)
    table.add_column("size", justify="right")
    for entry in entries:
        stored = entry.stored.strftime("%Y-%m-%d %H:%M") if entry.stored else "unknown"
        problems = "".join(f"\n{problem}" for problem in entry.problems)
        cells = (
            entry.name + problems,
            _base(entry),
            entry.method or "unknown",
            _data(entry),
            _figures(entry),
            stored,
        )
        # Unescaped brackets are markup for rich: "[Errno 13]" would vanish.
        table.add_row(*map(tables.plain, cells), _size(entry.size))
    tables.show(table, tables.console())
    return 0


def _base(entry: Entry) -> str:
    return at_revision(entry.base or "unknown", entry.revision and entry.revision[:12])


def _data(entry: Entry) -> str:
    if entry.made_from:
        return "\n".join(["combined from", *entry.made_from])
    return (
        f"{entry.data}\n{counted(entry.rows, 'row')}, {str(entry.data_sha256)[:12]}"
        if entry.rows is not None
        else "unknown"
    )


def _figures(entry: Entry) -> str:
    """Return a line for each of the first figures that the objective aims at, with their direction."""
    shown = [figure for figure in entry.figures if figure.better != "neither"][:FIGURES]
    return "\n".join(map(_figure, shown)) or "not measured"


def _figure(figure: MeasuredFigure) -> str:
    form = "{:.3g} %" if figure.is_share else "{:.4g}"
    values = [
        100 * side.value if figure.is_share else side.value for side in (figure.base, figure.tuned) if side
    ]
    text = f"{figure.title} {' to '.join(map(form.format, values))}"
    return f"{text} {figure.unit.removeprefix('share').strip()}".rstrip()


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
