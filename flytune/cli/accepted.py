"""`flytune accepted ADDRESS`."""

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from flytune.addresses import redact
from flytune.console import tables
from flytune.errors import printable
from flytune.registry import Decision, history


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", help="the folder or fsspec address with the decisions of scheduled runs")
    parser.add_argument("--rollback", action="store_true", help="accept the previously accepted model again")
    parser.add_argument(
        "--reason", default="rolled back by hand", help="reason for the rollback, for the history"
    )
    parser.add_argument("--json", action="store_true", help="print the decisions as JSON")


def run(options: argparse.Namespace) -> int:
    """Show all decisions; with --rollback, after going back to the previous model."""
    if options.rollback:
        history.rollback(options.address, options.reason)
    decisions = history.decisions_at(options.address)
    if options.json:
        shown = (
            json.dumps(_redacted(decision.model_dump(mode="json")), ensure_ascii=False)
            for decision in decisions
        )
        sys.stdout.write("[" + ",\n".join(shown) + "]\n")
    elif not decisions:
        sys.stdout.write(f"{options.address}: no decisions yet\n")
    else:
        _show(decisions, tables.console())
    return 0


def _redacted(value: Any) -> Any:
    """Return a value of mappings, lists and texts without the credentials that old decisions may have."""
    if isinstance(value, dict):
        return {key: _redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def _show(decisions: list[Decision], console: Console) -> None:
    table = Table(title_justify="left", pad_edge=False)
    for column in ("", "time (UTC)", "outcome"):
        table.add_column(column, no_wrap=True)
    for column in ("loss", "difference, 95 %"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("artifact", "reason"):
        table.add_column(column)
    for decision in decisions:
        duel = decision.duel
        figures = ("", "")
        if duel:
            figures = (
                f"{duel.challenger:.4f}",
                f"{duel.difference:+.4f} ({duel.difference_low:+.4f}, {duel.difference_high:+.4f})",
            )
        # For other outcomes the figures are the reason.
        reason = decision.reason if decision.outcome == "rolled back" or not duel else ""
        table.add_row(
            str(decision.number),
            f"{decision.time:%Y-%m-%d %H:%M}",
            decision.outcome,
            *figures,
            tables.plain(redact(decision.artifact)),
            tables.plain(redact(reason)),
        )
    tables.show(table, console, below=("artifact", "reason"))
    accepted = history.current(decisions)
    shown = printable(redact(accepted.artifact)) if accepted else "no model"
    console.print(f"accepted: {shown}", markup=False, highlight=False, soft_wrap=True)
