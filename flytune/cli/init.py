"""`flytune init DATA`."""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

from flytune import files
from flytune.errors import RecipeError, printable
from flytune.hardware import load_shapes, this_machine
from flytune.models import base as hub_reads
from flytune.planning import first_recipe
from flytune.recipe import read_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data", help="a file, folder or address with samples, or a data set on the hub, owner/name"
    )
    parser.add_argument(
        "--out", default="recipe.yaml", metavar="FILE", help="a new file (default: recipe.yaml)"
    )
    parser.add_argument("--base", metavar="MODEL", help="the base model, a hub id or a folder")
    parser.add_argument(
        "--on", metavar="ROW", help="this-machine, a row of shapes.yaml, or auto: the cheapest row"
    )
    parser.add_argument("--aim", metavar="AIM", help="what matters most: price, time or quality")
    parser.add_argument(
        "--objective",
        choices=list(first_recipe.OBJECTIVES),
        help="what the rows are for, where their columns do not show it",
    )
    parser.add_argument(
        "--yes", action="store_true", help="take the default of each question that no option answers"
    )


def run(options: argparse.Namespace) -> int:
    """Ask what the data cannot say, and write a new recipe."""
    rows = [this_machine.NAME, "auto", *(shape.name for shape in load_shapes())]
    default = options.base or first_recipe.default_base(options.data)
    base = _answer(options, "base", "base model, a hub id or a folder", default)
    where = _answer(
        options,
        "on",
        "where it runs: this-machine, auto (the cheapest of shapes.yaml), or a row",
        this_machine.NAME,
    )
    aim = _answer(options, "aim", f"what matters most: {', '.join(first_recipe.AIMS)}", first_recipe.AIMS[0])
    if where not in rows:
        raise RecipeError(f"--on {where:.60}: no row of shapes.yaml; it can be one of {', '.join(rows)}")
    chosen = next((known for known in first_recipe.AIMS if known == aim), None)
    if chosen is None:
        raise RecipeError(f"--aim {aim:.60}: it can be one of {', '.join(first_recipe.AIMS)}")
    sys.stderr.write(printable(f"{options.data}: reading its first rows, then trying what fits ...") + "\n")
    is_here = Path(base).expanduser().is_dir() and "path" in first_recipe.source_of(options.data)
    with nullcontext() if is_here else hub_reads.without_waiting_for_the_hub():
        text = first_recipe.recipe_text(
            first_recipe.Asked(options.data, base, where, chosen, options.objective)
        )
    with files.new_output(Path(options.out)) as temporary:
        temporary.write_text(text, encoding="utf-8")
        read_recipe(temporary)
    sys.stdout.write(printable(text))
    sys.stderr.write(
        f"{options.out} is written. Next: flytune plan {options.out}; flytune run {options.out}\n"
    )
    return 0


def _answer(options: argparse.Namespace, name: str, question: str, default: str) -> str:
    """Return what a flag says, or what a person in the terminal does, or the default.

    Raises:
        RecipeError: there is no terminal to ask in.
    """
    if given := getattr(options, name):
        return str(given)
    if options.yes:
        return default
    if not sys.stdin.isatty():
        raise RecipeError(
            f"--{name}: {question}: there is no terminal to ask in; say it, or --yes for the default, "
            f"{default}"
        )
    sys.stderr.write(f"{question} [{default}]: ")
    sys.stderr.flush()
    return sys.stdin.readline().strip() or default
