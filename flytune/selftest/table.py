"""The matrix as a table: on a terminal, as text, and as a page."""

import io
import math

from rich.console import Console
from rich.table import Table

from flytune.console import tables
from flytune.selftest.matrix import TOLERANCES, Cell, Matrix
from flytune.sentences import counted
from flytune.sharding import SHARDINGS

_STYLES = {
    "equal": "green",
    "differs": "bold red",
    "failed": "bold red",
    "refused": "dim",
    "lacking": "yellow",
}
WIDTH = 120


def show(matrix: Matrix, console: Console) -> None:
    """Print the table, the reasons for its entries, and the largest differences."""
    methods = list(dict.fromkeys(cell.method for cell in matrix.cells))
    cells = {
        (cell.sharding, cell.offload, cell.rows, cell.model, cell.parallel, cell.method): cell
        for cell in matrix.cells
    }
    table = Table(title=f"Compared with plain training, on {matrix.machine}", title_justify="left")
    for name in ("sharding", *methods):
        table.add_column(name)
    for row in dict.fromkeys(key[:-1] for key in cells):
        sharding, offload, rows, model, parallel = row
        # An offload that the sharding does not support is reported once, below the table.
        if offload in SHARDINGS[sharding].offloads:
            name = sharding + f", offload {offload}" * (offload != "none") + f", {rows}" * (rows != "chats")
            name += f", {model}" * (model != "dense") + f", {parallel}" * (parallel != "data")
            table.add_row(name, *(_words(cells.get((*row, method))) for method in methods))
    tables.show(table, console)
    for state, title in {
        "differs": "DIFFERS",
        "failed": "FAILED",
        "refused": "refused",
        "lacking": "not on this machine",
    }.items():
        if reasons := list(dict.fromkeys(cell.reason for cell in matrix.cells if cell.state == state)):
            console.print(f"{title}:", style=_STYLES[state])
            for reason in reasons:
                console.print(f"  {reason}", markup=False, highlight=False, soft_wrap=True)
    console.print(_summary(matrix), markup=False, highlight=False, soft_wrap=True)


def html(matrix: Matrix) -> str:
    """Return the same output as an HTML page."""
    return _recorded(matrix).export_html(inline_styles=True)


def text(matrix: Matrix) -> str:
    """Return the same output as plain text."""
    return _recorded(matrix).export_text()


def _recorded(matrix: Matrix) -> Console:
    console = Console(record=True, file=io.StringIO(), width=WIDTH)
    show(matrix, console)
    return console


def _words(cell: Cell | None) -> str:
    return f"[{_STYLES[cell.state]}]{cell.words}[/]" if cell else ""


def _summary(matrix: Matrix) -> str:
    distances = [distance for cell in matrix.cells for distance in cell.distances]
    lines = [
        "The number after `equal` is the largest relative difference of a step's loss over all layouts. All "
        "differences:"
    ]
    for name, tolerance in TOLERANCES.items():
        values = [getattr(distance, name) for distance in distances]
        # Python's max ignores NaN.
        largest = max(values, key=lambda value: math.inf if math.isnan(value) else value, default=0.0)
        lines.append(f"  {name}: at most {largest:.1e}; tolerance {tolerance:.0e}")
    lines.append(
        f"Global batch size {matrix.global_batch_size}, {counted(len(distances), 'run')} compared, "
        f"{matrix.seconds:.0f} s."
    )
    return "\n".join(lines)
