"""`flytune xray RECIPE`."""

import argparse
import sys
import webbrowser
from pathlib import Path

from flytune.recipe import Recipe
from flytune.report import xray


def run(options: argparse.Namespace) -> int:
    """Write the page, and print its path."""
    recipe = Recipe.from_yaml(options.recipe)
    page = xray.recipe_page(recipe, options.rows, Path(options.out or f".xray/{recipe.name}.html"))
    sys.stdout.write(f"{page}\n")
    if options.open:
        webbrowser.open(page.resolve().as_uri())
    return 0
