"""`flytune plan RECIPE` and `flytune plan --compare RECIPE RECIPE`."""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from rich.console import Console

from flytune.cli import arguments
from flytune.cluster import folders, uploads
from flytune.console import tables
from flytune.dryrun import confirm
from flytune.errors import FlytuneError, RecipeError, printable
from flytune.evaluation import tasks
from flytune.files import new_output
from flytune.hardware import Shape, load_cluster, load_shapes, this_machine
from flytune.planning import (
    comparing,
    document,
    drawn,
    largest,
    planner,
    ranking,
    sample_count,
    solving,
    stage_shapes,
    table,
)
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import Recipe, learning_rates, read_recipe
from flytune.records import Plan
from flytune.report import charts
from flytune.sentences import counted

DRY_RUN = "dry run: running the model's code on empty tensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="a recipe file")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar="RECIPE",
        help="what changes in memory, time and price from one recipe to another",
    )
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="a folder of prepared data, whose lengths and order of batches are planned with",
    )
    parser.add_argument(
        "--svg", metavar="FILE", help="write a picture of memory by phase into a new file, too"
    )
    parser.add_argument(
        "--shape",
        help="a row of shapes.yaml instead of the recipe's; auto: rank all of them with every sharding",
    )
    parser.add_argument("--by", choices=("price", "time"), help="order of --shape auto (default: price)")
    parser.add_argument(
        "--samples",
        type=int,
        help="number of training samples, for hours and price (default: counted in the recipe's local files)",
    )
    parser.add_argument(
        "--solve",
        metavar="FIELD",
        help="largest value that fits of data.max_length, training.per_device_train_batch_size, method.r or "
        "num_hidden_layers; gpus: the fewest; price or hours: the least within --max-hours or --max-price",
    )
    parser.add_argument("--max-hours", type=float, help="hardware.max_hours instead of the recipe's")
    parser.add_argument("--max-price", type=float, help="hardware.max_price instead of the recipe's")
    arguments.add_setting(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="confirm GPU memory by running the model's code on empty tensors",
    )


def run(options: argparse.Namespace) -> int:
    """Show a plan, with --shape auto the ranking of all, with --solve an answer, with --compare two plans."""
    console = tables.console()
    if options.compare:
        return _compare(options, console)
    if options.recipe is None:
        raise RecipeError("flytune plan: which recipe? Name its file, or two after --compare")
    recipe, count = _read(options.recipe, options, console)
    _check(options)
    if options.solve:
        return _solve(recipe, options, count, console)
    if options.shape == "auto":
        return _rank(recipe, options, count, console)
    on_shape, plan = _planned(recipe, count, options, console)
    if options.svg:
        with new_output(Path(options.svg)) as temporary:
            temporary.write_text(charts.planned_memory(plan), encoding="utf-8")
    if options.json:
        sys.stdout.write(document.as_json(plan))
        return 0
    table.show(plan, console)
    if not options.shape:
        for line in _beside(recipe, count.samples, plan):
            console.print(f"- {printable(line)}", highlight=False, markup=False)
    if plan.shape not in (this_machine.NAME, this_machine.CPU_NAME):
        for problem in folders.problems(on_shape, load_cluster(), plan.shape, uploaded=False):
            console.print(f"- on a cluster this is refused: {problem}", highlight=False, markup=False)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other."""
    for name in ("solve", "shape", "data"):
        if getattr(options, name) == "":
            raise RecipeError(f"--{name}: it is empty; name what you mean, or leave it out")
    has_several = options.solve or options.shape == "auto"
    if options.by and options.shape != "auto":
        raise RecipeError("--by: it orders what --shape auto ranks; add --shape auto, or leave --by out")
    if options.svg and has_several:
        raise RecipeError("--svg: a picture is of one plan; leave out --solve and --shape auto")
    if options.data and (has_several or options.dry_run or options.samples):
        raise RecipeError(
            "--data: one recipe is planned on one shape; leave out --solve, --shape auto, --dry-run and "
            "--samples"
        )


def _rank(
    recipe: Recipe, options: argparse.Namespace, count: sample_count.SampleCount, console: Console
) -> int:
    """Show all shapes with every sharding, the best first."""
    order: Literal["price", "time"] = options.by or "price"
    ranked = planner.rank(recipe, order)
    plans = [
        sample_count.with_origin(planner.plan_of(fit, count.samples, "one of those that fit"), count)
        for fit in ranked.fits[: table.ROWS]
    ]
    if options.json:
        sys.stdout.write(table.ranking_json(recipe, ranked, plans) + "\n")
        return 0
    table.show_ranking(recipe, ranked, plans, order, console)
    for line in (count.origin, *count.warnings, learning_rates.doubt(recipe)):
        if line:
            console.print(printable(line), highlight=False, markup=False)
    return 0


def _beside(recipe: Recipe, samples: int | None, plan: Plan) -> Iterator[str]:
    """Yield what a plan of `hardware.shape: auto` does not say: the cheapest run with any sharding, and a run
    here."""
    geometry = read_geometry(recipe.model)
    if recipe.hardware.shape != "auto" or geometry.unsupported:
        return
    best = planner.rank(recipe, "price").fits[0]
    price, planned = 1e9 * best.price_per_token, plan.price_per_billion_tokens
    if planned and price < 0.99 * planned:
        yield (
            f"cheaper with {ranking.changes(recipe, best.recipe)}: {best.shape.name}, ${price:,.0f} a "
            "billion tokens (--shape auto lists all)"
        )
    try:
        here = planner.make(recipe, this_machine.rows(), geometry, samples)
        outcome = here.headline
    except FlytuneError as error:
        outcome = "; ".join(" ".join(line.split()) for line in str(error).splitlines()[:2])
    yield (
        "`flytune run` without --remote is on this machine "
        f"({this_machine.described(this_machine.rows()[0])}): {outcome}"
    )


def _read(
    path: str, options: argparse.Namespace, console: Console
) -> tuple[Recipe, sample_count.SampleCount]:
    """Return a recipe with the limits of the command line, and the number of its samples."""
    recipe = read_recipe(path, options.set)
    if options.max_hours or options.max_price:
        recipe = _limited(recipe, options)
    problems = uploads.missing(recipe)
    if problems:
        raise RecipeError.of(f"recipe {recipe.name}: local files", problems)
    if recipe.evaluation.tasks and importlib.util.find_spec("lm_eval"):
        with console.status("evaluation.tasks: reading the index"):
            tasks.jobs(recipe)
    warnings = tuple(sample_count.doubts(recipe))
    if options.samples:
        origin = f"{counted(options.samples, 'training sample')}: as --samples says"
        return recipe, sample_count.SampleCount(options.samples, origin, warnings)
    return recipe, sample_count.counted(recipe)._replace(warnings=warnings)


def _planned(
    recipe: Recipe, count: sample_count.SampleCount, options: argparse.Namespace, console: Console
) -> tuple[Recipe, Plan]:
    """Return a recipe on the shape that the command line names, and its plan."""
    if options.shape:
        recipe = planner.on_shape(recipe, options.shape)
    geometry = read_geometry(recipe.model)
    shapes = _shapes(recipe)
    if options.data:
        return recipe, drawn.make(recipe, geometry, Path(options.data), shapes)
    is_traced = geometry.unsupported is not None
    with console.status(DRY_RUN) if is_traced else nullcontext():
        recipe, plan = planner.decide(recipe, shapes, geometry, count.samples, trace=confirm.best_fit)
    plan = sample_count.with_origin(plan, count)
    stage_shapes.evaluation_shape(recipe, plan, geometry)
    if options.dry_run and plan.memory.engine != "dry run":
        with console.status(DRY_RUN):
            plan = confirm.confirmed(recipe, plan)
    return recipe, plan


def _shapes(recipe: Recipe) -> tuple[Shape, ...]:
    """Return the rows of shapes.yaml, and those of this machine where the recipe names one of them."""
    here = this_machine.rows() if recipe.hardware.shape in (this_machine.NAME, this_machine.CPU_NAME) else ()
    return (*load_shapes(), *here)


def _compare(options: argparse.Namespace, console: Console) -> int:
    """Show what changes from one recipe to another."""
    if options.recipe or options.solve or options.svg or options.data or options.shape == "auto":
        raise RecipeError(
            "--compare: takes two recipes and nothing else to plan; leave out what else there is"
        )
    (recipe, count), (other, other_count) = [_read(path, options, console) for path in options.compare]
    _, plan = _planned(recipe, count, options, console)
    _, other_plan = _planned(other, other_count, options, console)
    recipes, plans = (recipe, other), (plan, other_plan)
    if options.json:
        sys.stdout.write(comparing.as_json(recipes, plans))
    else:
        comparing.show(recipes, plans, console)
    return 0


def _limited(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """Return the recipe with the limits of the command line."""
    limits = {
        name: value for name in ("max_hours", "max_price") if (value := getattr(options, name)) is not None
    }
    return recipe.model_copy(update={"hardware": recipe.hardware.model_copy(update=limits)})


def _solve(
    recipe: Recipe, options: argparse.Namespace, count: sample_count.SampleCount, console: Console
) -> int:
    """Show the largest value of a field that fits, the fewest GPUs, or the least price or time, and its
    plan."""
    field = solving.named(options.solve)
    if options.dry_run:
        raise RecipeError("--dry-run: --solve asks the closed form; confirm the recipe with the answer in it")
    if options.shape:
        if field not in largest.FIELDS and options.shape != "auto":
            raise RecipeError(
                f"--shape {options.shape:.60}: --solve {field} is answered by all shapes; leave it out"
            )
        recipe = planner.on_shape(recipe, options.shape)
    answer = solving.solve(recipe, field, read_geometry(recipe.model), count.samples, _shapes(recipe))
    plan = planner.plan_of(answer.fit, count.samples, f"the answer to --solve {field}")
    plan = sample_count.with_origin(plan, count)
    if options.json:
        sys.stdout.write(solving.as_json(answer, plan) + "\n")
        return 0
    table.show(plan, console)
    for line in solving.described(answer):
        console.print(printable(line), highlight=False, markup=False)
    return 0
