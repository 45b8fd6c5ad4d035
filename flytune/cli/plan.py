"""`flytune plan RECIPE`."""

import argparse
import sys
from contextlib import nullcontext

from flytune.console import tables
from flytune.hardware import load_cluster
from flytune.models import read_geometry
from flytune.planning import evaluation_shape, folders, planner, sample_count, table
from flytune.planning.dryrun import confirm
from flytune.recipe import Recipe

DRY_RUN = "dry run: running the model's code on empty tensors"


def run(options: argparse.Namespace) -> int:
    """Show a plan, or with --shape auto the ranking of all."""
    recipe, console = Recipe.from_yaml(options.recipe), tables.console()
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
    geometry = read_geometry(recipe.model)
    is_traced = geometry.unsupported is not None
    with console.status(DRY_RUN) if is_traced else nullcontext():
        made_plan = planner.make(recipe, geometry=geometry, samples=samples)
    evaluation_shape.shape_for(recipe, made_plan, geometry)
    if options.dry_run and made_plan.memory.engine != "dry run":
        with console.status(DRY_RUN):
            made_plan = confirm.confirmed(recipe, made_plan)
    if options.json:
        sys.stdout.write(made_plan.model_dump_json(indent=2) + "\n")
    else:
        table.show(made_plan, console)
        for problem in folders.problems(recipe, load_cluster(), made_plan.shape, uploaded=False):
            console.print(f"- on a cluster this is refused: {problem}", highlight=False, markup=False)
    return 0
