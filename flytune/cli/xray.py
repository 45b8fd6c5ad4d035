"""`flytune xray RECIPE`."""

import argparse
import sys
import webbrowser
from pathlib import Path

from flytune.errors import RecipeError
from flytune.recipe.recipe import Recipe
from flytune.report import xray


def run(options: argparse.Namespace) -> int:
    """Writes the page, and says where."""
    recipe = Recipe.from_yaml(options.recipe)
    if options.rows < 1:
        raise RecipeError(f"--rows {options.rows}: it takes a row at least")
    made = xray.of_recipe(recipe, options.rows, Path(options.out or f".xray/{recipe.name}.html"))
    sys.stdout.write(f"{made}\n")
    if options.open:
        webbrowser.open(made.resolve().as_uri())
    return 0
