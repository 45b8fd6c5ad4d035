"""`flytune plan RECIPE`."""

import argparse
import sys

from flytune.console import tables
from flytune.errors import RecipeError
from flytune.hardware import load_cluster
from flytune.planning import evaluation_shape, folders, planner, sample_count, table
from flytune.planning.dryrun import confirm
from flytune.recipe import Recipe


def run(options: argparse.Namespace) -> int:
    """Show a plan, or with --shape auto the ranking of all."""
    recipe, console = Recipe.from_yaml(options.recipe), tables.console()
    if options.samples is not None and options.samples < 1:
        raise RecipeError(f"--samples {options.samples}: at least one sample is needed")
    samples = options.samples or sample_count.samples_guess(recipe.data)
    if options.shape == "auto":
        ranking = planner.rank(recipe, options.by)
        made = [planner.plan_of(fit, samples) for fit in ranking.fits[: table.ROWS]]
        if options.json:
            sys.stdout.write(table.ranking_json(recipe, ranking, made) + "\n")
        else:
            table.show_ranking(recipe, ranking, made, options.by, console)
        return 0
    if options.shape:
        recipe = planner.on_shape(recipe, options.shape)
    made_plan = planner.make(recipe, samples=samples)
    evaluation_shape.shape_for(recipe, made_plan)
    if options.dry_run:
        with console.status("dry run: running the model's code on empty tensors"):
            made_plan = confirm.confirmed(recipe, made_plan)
    if options.json:
        sys.stdout.write(made_plan.model_dump_json(indent=2) + "\n")
    else:
        table.show(made_plan, console)
        for problem in folders.problems(recipe, load_cluster(), made_plan.shape, uploaded=False):
            console.print(f"- on a cluster this is refused: {problem}", highlight=False, markup=False)
    return 0
