"""The command line: `flytune plan RECIPE` and `flytune schema`. Running is pyflyte's."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from flytune import planner
from flytune.errors import FlytuneError
from flytune.recipe import Recipe, json_schema
from flytune.records import Plan
from flytune.shapes import GIB


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code, 1 when the recipe has to be mended first."""
    parser = argparse.ArgumentParser(prog="flytune", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="say whether a recipe fits, on what, and why; nothing is started")
    plan.add_argument("recipe", help="a recipe file")
    plan.add_argument("--json", action="store_true", help="the plan as JSON")
    commands.add_parser("schema", help="the JSON schema of recipe files")
    options = parser.parse_args(arguments)
    if options.command == "schema":
        sys.stdout.write(json_schema())
        return 0
    try:
        made = planner.make(Recipe.from_yaml(options.recipe))
    except FlytuneError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"{type(error).__name__}: {error}", markup=False)
        return 1
    if options.json:
        sys.stdout.write(made.model_dump_json(indent=2) + "\n")
    else:
        show(made, Console())
    return 0


def show(plan: Plan, console: Console) -> None:
    """The plan as a table for people."""
    table = Table(title=f"{plan.recipe} on {plan.shape}", title_justify="left", show_footer=True)
    table.add_column("memory of one process", footer="estimated")
    table.add_column("GiB", justify="right", footer=f"{plan.memory_bytes / GIB:.2f} of {plan.memory_available_bytes / GIB:.1f}")
    for component in plan.memory:
        table.add_row(component.name, f"{component.bytes / GIB:.2f}")
    console.print(table)
    console.print(
        f"{plan.nodes} x {plan.processes} processes ({plan.accelerator}), ${plan.price_per_hour:.2f} an hour; trains "
        f"{plan.trained_parameters / 1e6:,.1f}M of {plan.total_parameters / 1e6:,.1f}M parameters"
    )
    for reason in plan.reasons:
        console.print(f"- {reason}", highlight=False)
