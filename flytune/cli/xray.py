"""`flytune xray RECIPE`."""

import argparse
import sys
import webbrowser
from contextlib import nullcontext
from pathlib import Path

from flytune.errors import printable
from flytune.models import base
from flytune.recipe import read_recipe
from flytune.report import xray
from flytune.sentences import counted_of


def run(options: argparse.Namespace) -> int:
    """Write the page, and print its path, and on stderr what the run would do; with --check, 1 if a check would stop it."""
    recipe = read_recipe(options.recipe, options.set)
    named = [recipe.data.dataset_name, *(source.dataset_name for source in recipe.data.sources or ())]
    asks_hub = base.is_on_hub(recipe.model) or any(named)
    with base.without_waiting_for_the_hub() if asks_hub else nullcontext():
        made = xray.recipe_page(recipe, options.rows, Path(options.out or f".xray/{recipe.name}.html"))
    sys.stdout.write(f"{made.path}\n")
    lines = [made.summary]
    if made.bad_rows:
        lines.append(f"{counted_of(made.bad, made.rows, 'row', 'is', 'are')} bad; all of them are listed in {made.bad_rows}")
    said = {"thoughts", *(["left out"] if made.left_out else [])}
    lines += [one.found for one in made.contract.checks if one.name in said]
    sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))
    if options.open:
        webbrowser.open(made.path.resolve().as_uri())
    return 1 if options.check and made.stops else 0
