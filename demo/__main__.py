"""`make demo`: from a recipe to a stored artifact, twice, on this machine, without a hub and without a GPU."""

import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo import inputs
from flytune.recipe.recipe import Recipe
from flytune.records.metrics import Metrics

RECIPES = [Path("recipes/demo-qlora.yaml"), Path("recipes/demo-full-zero2.yaml")]
HOME = Path(".demo")


def run(recipe: Path, console: Console) -> tuple[Path, float]:
    """Runs one recipe as a user would; returns its artifact's folder and the seconds it took."""
    command = ["pyflyte", "run", "workflows/finetune.py", "finetune", "--recipe", str(recipe)]
    console.rule(f"[bold]{' '.join(command)}", align="left")
    published = Path(Recipe.from_yaml(recipe).publish.address or HOME)
    before = {path.name for path in published.glob("*")}
    started = time.monotonic()
    # The hub is not asked, and what is cached locally is this demo's own.
    done = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    seconds = time.monotonic() - started
    if done.returncode:
        console.print(f"[red]{recipe} failed (exit code {done.returncode}); what went wrong stands above.")
        sys.exit(1)
    (artifact,) = [path for path in published.glob("*") if path.name not in before]
    return artifact, seconds


def right(metrics: Metrics) -> str:
    """Of the harness's questions, the share that base and tuned model answer rightly."""
    score = next(score for score in metrics.tasks if score.metric.startswith("acc,"))
    return f"{score.base:.2f} -> {score.tuned:.2f}"


def main() -> int:
    """Makes the inputs, runs both recipes, shows the table; 1 if a tuned model is not better than its base."""
    console = Console()
    started = time.monotonic()
    # DeepSpeed's import says that it has found no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    console.print("[bold]Flytune demo:[/] two fine-tunes on this machine; about five minutes, less when run again.")
    inputs.make(HOME)
    title = "Held-out perplexity, and the share of a few questions (lm-evaluation-harness) answered rightly"
    table = Table(title=title, title_justify="left")
    for column in ("run", "before", "after (95 % interval)", "questions", "minutes"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    worse, places = [], []
    for path in RECIPES:
        artifact, seconds = run(path, console)
        metrics = Metrics.read(artifact / "metrics.json")
        tuned = metrics.tuned
        table.add_row(
            path.stem,
            f"{metrics.base.perplexity:.1f}",
            f"{tuned.perplexity:.1f} ({tuned.perplexity_low:.1f} to {tuned.perplexity_high:.1f})",
            right(metrics),
            f"{seconds / 60:.1f}",
        )
        places += [f"  artifact {artifact}", f"  report   {artifact / 'report.html'}"]
        if not metrics.is_better:
            worse.append(path.stem)
    console.rule()
    console.print(table)
    console.print("\n".join(places), highlight=False, soft_wrap=True)
    console.print(f"{(time.monotonic() - started) / 60:.1f} minutes in all.")
    if worse:
        console.print(f"[red]Not better than its base on held-out pairs, beyond doubt: {', '.join(worse)}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
