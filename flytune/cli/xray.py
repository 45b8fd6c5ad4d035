"""`flytune xray RECIPE`."""

import argparse
import sys
import webbrowser
from contextlib import nullcontext
from pathlib import Path

from flytune.cli import arguments
from flytune.errors import printable
from flytune.models import base
from flytune.recipe import read_recipe
from flytune.report import xray
from flytune.sentences import counted_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe file")
    arguments.add_setting(parser)
    parser.add_argument(
        "--rows", type=int, default=1000, help="number of first rows to read of each source (default: 1000)"
    )
    parser.add_argument("--out", help="path of the page (default: .xray/NAME.html)")
    parser.add_argument(
        "--force", action="store_true", help="replace the file at --out, even if it is not a page of xray"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a check would stop the run, for CI (default: 0)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(options: argparse.Namespace) -> int:
    """Write the page, and print its path, and on stderr what the run would do; with --check, 1 if a check
    would stop it."""
    recipe = read_recipe(options.recipe, options.set)
    named = [recipe.data.dataset_name, *(source.dataset_name for source in recipe.data.sources or ())]
    asks_hub = base.is_on_hub(recipe.model) or any(named)
    with base.without_waiting_for_the_hub() if asks_hub else nullcontext():
        page = xray.recipe_page(recipe, options.rows, Path(options.out or f".xray/{recipe.name}.html"))
    sys.stdout.write(f"{page.path}\n")
    lines = [page.summary]
    if page.bad_rows:
        lines.append(
            f"{counted_of(page.bad, page.rows, 'row', 'is', 'are')} bad; all of them are listed in "
            f"{page.bad_rows}"
        )
    shown_checks = {"thoughts", *(["left out"] if page.left_out else [])}
    lines += [check.found for check in page.contract.checks if check.name in shown_checks]
    sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))
    if options.open:
        webbrowser.open(page.path.resolve().as_uri())
    return 1 if options.check and page.stops else 0
