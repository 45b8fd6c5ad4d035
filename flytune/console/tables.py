"""Tables for consoles of any width, without broken words or truncated cells."""

import os
import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from flytune.errors import printable

WIDE = 1000
"""Columns of a console that is not a terminal: lines of logs and pipes may have any length."""


def console() -> Console:
    """Return the standard output with the width of its terminal or of COLUMNS; otherwise with WIDE."""
    return Console(width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else WIDE, emoji=False)


def plain(text: str) -> str:
    """Return a text from outside as markup that shows it as it is, without control characters."""
    return escape(printable(text))


def show(table: Table, console: Console, below: Sequence[str] = ()) -> None:
    """Print the table, with wrapped cells if the console is too narrow.

    If single words are too wide, the columns named in `below` are printed after the table, one line per row;
    if that is not enough, each cell is a line.
    """
    if table.title:
        console.print(table.title, style="italic", highlight=False, soft_wrap=True)
        table.title = None
    if _fitted(table, console):
        console.print(table)
        return
    moved = [column for column in table.columns if column.header in below]
    rest = copy(table)
    rest.columns = [
        replace(column, _index=index)
        for index, column in enumerate(c for c in table.columns if c not in moved)
    ]
    if moved and _fitted(rest, console):
        console.print(rest)
        _line(console, f"{', '.join(str(column.header) for column in moved)}:")
        for cells in zip(*(column.cells for column in (table.columns[0], *moved)), strict=True):
            _line(console, "  ".join(str(cell) for cell in cells if cell))
        return
    _records(table, console)


def _fitted(table: Table, console: Console) -> bool:
    """Return whether no word must be broken, and set the widths of the columns accordingly."""
    options = console.options.update(max_width=WIDE)
    if Measurement.get(console, options, table).maximum <= console.width:
        return True
    sizes = [_size(table, column, console) for column in table.columns]
    between = Measurement.get(console, options, table).maximum - sum(most for _, most in sizes)
    spare = console.width - between - sum(least for least, _ in sizes)
    if spare < 0:
        return False
    wanted = sum(most - least for least, most in sizes)
    for column, (least, most) in zip(table.columns, sizes, strict=True):
        column.width, column.no_wrap = least + spare * (most - least) // wanted, False
    return True


def _size(table: Table, column: Column, console: Console) -> tuple[int, int]:
    """Return the widths of a column's longest word and longest line."""
    shown = [column.header, *column.cells, *([column.footer] if table.show_footer else [])]
    sizes = [Measurement.get(console, console.options.update(max_width=WIDE), _text(cell)) for cell in shown]
    most = max(size.maximum for size in sizes)
    return most if column.no_wrap else max(size.minimum for size in sizes), most


def _text(cell: object) -> Text:
    return Text.from_markup(str(cell), emoji=False)


def _records(table: Table, console: Console) -> None:
    """Print each cell as a line `header: cell`, with an empty line before each row."""
    rows = [
        [str(cell) for cell in row] for row in zip(*(column.cells for column in table.columns), strict=True)
    ]
    if table.show_footer:
        rows.append([str(column.footer) for column in table.columns])
    headers = [str(column.header) for column in table.columns]
    for row in rows:
        console.print()
        for header, cell in zip(headers, row, strict=True):
            if cell:
                _line(console, f"{header}: {cell}" if header else cell)


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)
