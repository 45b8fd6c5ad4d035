"""`flytune reproduce ARTIFACT`."""

import argparse
import shlex
import sys
from pathlib import Path

from rich.table import Table

from flytune.artifacts import fetch, reproduction
from flytune.console import tables

DIFFERENT = 3
"""Exit code of a second run whose data, losses or weights are not equal, bit for bit; an error has 1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", help="a folder, fsspec address or hf://owner/name with an artifact")
    parser.add_argument("--out", help="a new folder for the second run (default: .reproduce/NAME)")
    parser.add_argument("--remote", action="store_true", help="print the command that runs it on the cluster")
    parser.add_argument(
        "--with", dest="other", metavar="ARTIFACT", help="compare with this artifact instead of a new run"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that the artifact's recipe names"
    )
    parser.add_argument("--base", help="the base model, instead of the one that the artifact names")


def run(options: argparse.Namespace) -> int:
    """Run the recipe again, or compare with another artifact; return 0 if data, losses and weights are
    equal."""
    artifact = fetch.local_folder(options.artifact)
    recipe = reproduction.recipe_of(artifact, options.trust_remote_code, options.base)
    out = Path(options.out or f".reproduce/{recipe.name}")
    if options.remote:
        file = reproduction.write_recipe(recipe, out)
        sys.stdout.write(f"flytune run {shlex.quote(str(file))} --remote\n")
        sys.stdout.write(
            f"flytune reproduce {shlex.quote(options.artifact)} --with ADDRESS_OF_ITS_ARTIFACT\n"
        )
        return 0
    if options.other:
        second = fetch.local_folder(options.other)
    else:
        reproduction.check_data(artifact, recipe)
        second = reproduction.run_again(recipe, out)
    reproduced = reproduction.compare(artifact, second)
    if options.json:
        sys.stdout.write(reproduced.model_dump_json(indent=2) + "\n")
    else:
        table = Table(title=tables.plain(f"{artifact} compared with {second}"), title_justify="left")
        for column in ("property", "result", "artifact", "second run"):
            table.add_column(column)
        for finding in reproduced.findings:
            table.add_row(*map(tables.plain, (finding.name, finding.result, finding.first, finding.second)))
        tables.show(table, tables.console())
    return 0 if reproduced.is_equal else DIFFERENT
