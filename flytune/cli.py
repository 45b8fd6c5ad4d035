"""The command line: `flytune plan`, `xray`, `merge`, `calibrate`, `selftest` and `schema`. Running is pyflyte's."""

import argparse
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flytune import calibration, confirming, data, merging, plan_table, planner, xray
from flytune.errors import FlytuneError, RecipeError
from flytune.probing import PROMPTS
from flytune.recipe import Recipe, json_schema
from flytune.selftest import matrix, table
from flytune.selftest.ranks import RankFailed


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code, 1 when the recipe has to be mended first."""
    parser = argparse.ArgumentParser(prog="flytune", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="say whether a recipe fits, on what, and why; nothing is started")
    plan.add_argument("recipe", help="a recipe file")
    plan.add_argument("--json", action="store_true", help="the plan as JSON")
    plan.add_argument(
        "--shape", help="a row of shapes.yaml instead of the recipe's; auto: rank all of them, laid out in every way"
    )
    plan.add_argument("--by", choices=("price", "time"), default="price", help="what --shape auto ranks by")
    plan.add_argument(
        "--samples", type=int, help="that training will have, for hours and price; estimated for local JSON Lines"
    )
    plan.add_argument("--dry-run", action="store_true", help="confirm GPU memory by running the model's code on empty tensors")
    looked = commands.add_parser("xray", help="show what would be trained on, token by token; needs the tokenizer only")
    looked.add_argument("recipe", help="a recipe file")
    looked.add_argument("--rows", type=int, default=1000, help="read only the first so many (of each source)")
    looked.add_argument("--out", help="the page; .xray/NAME.html when not given")
    looked.add_argument("--open", action="store_true", help="in a browser")
    selftest = commands.add_parser("selftest", help="hold every method and sharding against plain training, on this machine")
    selftest.add_argument("--pairs", default="", help="only these, as in full/zero2,lora/zero3/cpu (method/sharding/offload)")
    selftest.add_argument("--json", action="store_true", help="the matrix as JSON")
    selftest.add_argument("--keep", metavar="DIR", help="a new folder in which every run's export and log stay")
    merge = commands.add_parser("merge", help="merge an artifact's adapter into its base, and say what that changes")
    merge.add_argument("artifact", help="a folder with recipe.yaml and adapter/")
    merge.add_argument("--out", required=True, help="a new folder for the merged model")
    merge.add_argument("--json", action="store_true", help="what was measured as JSON")
    calibrate = commands.add_parser("calibrate", help="learn from runs: a factor per shape that later plans are multiplied by")
    calibrate.add_argument("artifacts", nargs="+", help="folders that hold artifacts")
    commands.add_parser("schema", help="the JSON schema of recipe files")
    options = parser.parse_args(arguments)
    if options.command == "schema":
        sys.stdout.write(json_schema())
        return 0
    try:
        commanded = {"selftest": _selftest, "xray": _xray, "plan": _plan, "calibrate": _calibrate, "merge": _merge}
        return commanded[options.command](options)
    except (FlytuneError, RankFailed) as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"{type(error).__name__}: {error}", markup=False)
        return 1


def _plan(options: argparse.Namespace) -> int:
    recipe, console = Recipe.from_yaml(options.recipe), Console()
    if options.samples is not None and options.samples < 1:
        raise RecipeError(f"--samples {options.samples}: it takes a sample at least")
    samples = options.samples or data.samples_guess(recipe.data)
    if options.shape == "auto":
        ranking = planner.rank(recipe, options.by)
        made = [planner.plan_of(fit, samples) for fit in ranking.fits[: plan_table.ROWS]]
        if options.json:
            sys.stdout.write(plan_table.ranking_json(recipe, ranking, made) + "\n")
        else:
            plan_table.show_ranking(recipe, ranking, made, options.by, console)
        return 0
    if options.shape:
        recipe = planner.on_shape(recipe, options.shape)
    made_plan = planner.make(recipe, samples=samples)
    if options.dry_run:
        with console.status("dry run: the model's code on empty tensors"):
            made_plan = confirming.confirmed(recipe, made_plan)
    if options.json:
        sys.stdout.write(made_plan.model_dump_json(indent=2) + "\n")
    else:
        plan_table.show(made_plan, console)
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    comparisons = calibration.found([Path(folder) for folder in options.artifacts])
    rows = calibration.factors(comparisons)
    plan_table.show_calibration(comparisons, rows, Console())
    if not rows:
        raise RecipeError("nothing to learn from: only runs with data.packing or training.probe_longest are as long as planned")
    calibration.write(rows)
    return 0


def _xray(options: argparse.Namespace) -> int:
    recipe = Recipe.from_yaml(options.recipe)
    if options.rows < 1:
        raise RecipeError(f"--rows {options.rows}: it takes a row at least")
    made = xray.of_recipe(recipe, options.rows, Path(options.out or f".xray/{recipe.name}.html"))
    sys.stdout.write(f"{made}\n")
    if options.open:
        webbrowser.open(made.resolve().as_uri())
    return 0


def _selftest(options: argparse.Namespace) -> int:
    pairs = matrix.pairs_named(options.pairs)
    if options.keep and Path(options.keep).exists():
        raise RecipeError(f"--keep {options.keep}: is there already; the self-test's files need a folder of their own")
    # No thread that refreshes: the runs are forks of this process.
    with tempfile.TemporaryDirectory() as made, Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        bar = progress.add_task("imports, model and data", total=len(pairs))
        progress.refresh()

        def tell(cell: matrix.Cell) -> None:
            progress.update(bar, advance=1, description=f"{cell.method} {cell.sharding} {cell.words}", refresh=True)

        filled = matrix.fill(Path(options.keep or f"{made}/selftest"), pairs, tell)
    if options.json:
        sys.stdout.write(filled.model_dump_json(indent=2) + "\n")
    else:
        table.show(filled, Console())
    return 0 if filled.is_good else 1


def _merge(options: argparse.Namespace) -> int:
    made = merging.merge(Path(options.artifact), Path(options.out))
    if options.json:
        sys.stdout.write(made.model_dump_json(indent=2) + "\n")
        return 0
    of = f"{made.base} in {made.dtype}, {made.tokens} tokens of {len(PROMPTS)} prompts"
    table = Table(title=f"merged against trained: {of}", title_justify="left")
    table.add_column("the adapter on")
    for title in ("KL, nats a token", "worst token", "same next token", ""):
        table.add_column(title, justify="right")
    for candidate in made.candidates:
        numbers = f"{candidate.divergence:.2e}", f"{candidate.worst:.2e}", f"{candidate.agreement:.1%}"
        table.add_row(candidate.onto, *numbers, "kept" if candidate is made.candidates[0] else "")
    Console().print(table)
    sys.stdout.write(f"{options.out}\n")
    return 0
