"""The command line: `flytune plan RECIPE`, `xray RECIPE`, `merge ARTIFACT`, `selftest` and `schema`. Running is pyflyte's."""

import argparse
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flytune import merging, planner, xray
from flytune.errors import FlytuneError, RecipeError
from flytune.probing import PROMPTS
from flytune.recipe import Recipe, json_schema
from flytune.records import Plan
from flytune.selftest import matrix, table
from flytune.selftest.ranks import RankFailed
from flytune.shapes import GIB


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code, 1 when the recipe has to be mended first."""
    parser = argparse.ArgumentParser(prog="flytune", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="say whether a recipe fits, on what, and why; nothing is started")
    plan.add_argument("recipe", help="a recipe file")
    plan.add_argument("--json", action="store_true", help="the plan as JSON")
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
    commands.add_parser("schema", help="the JSON schema of recipe files")
    options = parser.parse_args(arguments)
    if options.command == "schema":
        sys.stdout.write(json_schema())
        return 0
    try:
        return {"selftest": _selftest, "xray": _xray, "plan": _plan, "merge": _merge}[options.command](options)
    except (FlytuneError, RankFailed) as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"{type(error).__name__}: {error}", markup=False)
        return 1


def _plan(options: argparse.Namespace) -> int:
    made = planner.make(Recipe.from_yaml(options.recipe))
    if options.json:
        sys.stdout.write(made.model_dump_json(indent=2) + "\n")
    else:
        show(made, Console())
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


def show(plan: Plan, console: Console) -> None:
    """The plan as a table for people."""
    table = Table(title=f"{plan.recipe} on {plan.shape}", title_justify="left", show_footer=True)
    table.add_column("memory of one process", footer="estimated")
    table.add_column("GiB", justify="right", footer=f"{plan.memory_bytes / GIB:.2f} of {plan.memory_available_bytes / GIB:.1f}")
    for component in plan.memory:
        table.add_row(component.name, f"{component.bytes / GIB:.2f}")
    console.print(table)
    console.print(
        f"{plan.nodes} x {plan.processes} processes ({plan.accelerator}), ${plan.price_per_hour:.2f} an hour; trains "
        f"{plan.trained_parameters / 1e6:,.1f}M of {plan.total_parameters / 1e6:,.1f}M parameters"
    )
    if plan.tokens_per_second:
        _show_time(plan, console)
    for reason in plan.reasons:
        console.print(f"- {reason}", highlight=False)


def _show_time(plan: Plan, console: Console) -> None:
    seconds = sum(plan.step_seconds.values())
    table = Table(title="forecast of one step", title_justify="left", show_footer=True)
    table.add_column("part", footer="a step")
    table.add_column("seconds", justify="right", footer=f"{seconds:.2f}")
    for part, taken in sorted(plan.step_seconds.items(), key=lambda item: -item[1]):
        table.add_row(part, f"{taken:.3f}")
    console.print(table)
    low, rate, high = plan.tokens_per_second
    hours = 1e9 / rate / 3600
    console.print(
        f"{rate:,.0f} tokens a second on all GPUs (likely {low:,.0f} to {high:,.0f}); a billion tokens take "
        f"{hours:,.1f} hours and cost ${hours * plan.price_per_hour:,.0f}"
    )
