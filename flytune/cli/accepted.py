"""`flytune accepted ADDRESS`."""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from flytune.addresses import redact
from flytune.console import tables
from flytune.errors import printable
from flytune.registry import Decision, history


def run(options: argparse.Namespace) -> int:
    """Show all decisions; with --rollback, after going back to the previous model."""
    if options.rollback:
        history.rollback(options.address, options.reason)
    decisions = history.decisions_at(options.address)
    if options.json:
        sys.stdout.write("[" + ",\n".join(decision.model_dump_json() for decision in decisions) + "]\n")
    elif not decisions:
        sys.stdout.write(f"{options.address}: no decisions yet\n")
    else:
        _show(decisions, tables.console())
    return 0


def _show(decisions: list[Decision], console: Console) -> None:
    table = Table(title_justify="left", pad_edge=False)
    for column in ("", "time (UTC)", "outcome"):
        table.add_column(column, no_wrap=True)
    for column in ("loss", "difference, 95 %"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("artifact", "reason"):
        table.add_column(column)
    for one in decisions:
        duel = one.duel
        figures = ("", "")
        if duel:
            figures = (
                f"{duel.challenger:.4f}",
                f"{duel.difference:+.4f} ({duel.difference_low:+.4f}, {duel.difference_high:+.4f})",
            )
        # For other outcomes the figures are the reason.
        reason = one.reason if one.outcome == "rolled back" or not duel else ""
        table.add_row(
            str(one.number),
            f"{one.time:%Y-%m-%d %H:%M}",
            one.outcome,
            *figures,
            tables.plain(redact(one.artifact)),
            tables.plain(redact(reason)),
        )
    tables.show(table, console, below=("artifact", "reason"))
    accepted = history.current(decisions)
    shown = printable(redact(accepted.artifact)) if accepted else "no model"
    console.print(f"accepted: {shown}", markup=False, highlight=False, soft_wrap=True)
