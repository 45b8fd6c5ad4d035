"""`make demo`: two runs from a recipe to a stored artifact, on this machine, without a hub or a GPU."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo import inputs
from flytune.artifacts import kept
from flytune.records import Metrics

RECIPES = [Path("recipes/demo-qlora.yaml"), Path("recipes/demo-full-zero2.yaml")]
HOME = Path(".demo")


def run(recipe: Path, console: Console) -> tuple[Path, float]:
    """Run one recipe as a user would; return the folder of its artifact, and the seconds."""
    command = ["flytune", "run", str(recipe)]
    console.rule(f"[bold]{' '.join(command)}", align="left")
    results = HOME / "artifacts"
    before = {path.name for path in results.glob("*")}
    started = time.monotonic()
    # The demo needs no files from the hub.
    done = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1", kept.VARIABLE: str(results)})
    seconds = time.monotonic() - started
    if done.returncode:
        console.print(f"[red]{recipe} failed (exit code {done.returncode}); the error is shown above.")
        sys.exit(1)
    (artifact,) = [path for path in results.glob("*") if path.name not in before]
    return artifact, seconds


def run_one(
    recipe: Path,
    title: str,
    make: Callable[[Path], None],
    verdict: Callable[[Metrics], str],
    worse: str,
    is_better: Callable[[Metrics], bool] = attrgetter("is_better"),
) -> int:
    """Make the inputs, run one recipe and show its result; return 1, and say `worse`, if the tuned model is
    not better."""
    console = Console()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    console.print(f"[bold]Flytune demo:[/] {title} on this machine.")
    make(HOME)
    artifact, seconds = run(recipe, console)
    metrics = Metrics.read(artifact / "metrics.json")
    console.rule()
    console.print(f"{verdict(metrics)}; {seconds / 60:.1f} minutes", highlight=False, soft_wrap=True)
    console.print(
        f"  artifact {artifact}\n  report   {artifact / 'report.html'}", highlight=False, soft_wrap=True
    )
    if is_better(metrics):
        return 0
    console.print(f"[red]{worse}")
    return 1


def accuracy(metrics: Metrics) -> str:
    """Return the shares of the harness's questions that the base and the tuned model answer correctly."""
    score = next(score for score in metrics.tasks if score.metric.startswith("acc,"))
    return f"{score.base:.2f} -> {score.tuned:.2f}"


def main() -> int:
    """Make the inputs, run both recipes, and show the table; return 1 if a tuned model is not better than its
    base."""
    console = Console()
    started = time.monotonic()
    # Without this, DeepSpeed's import prints that it has found no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    console.print(
        "[bold]Flytune demo:[/] two fine-tuning runs on this machine, about five minutes, less if repeated."
    )
    inputs.make(HOME)
    title = "Held-out perplexity, and the share of questions (lm-evaluation-harness) answered correctly"
    table = Table(title=title, title_justify="left")
    for column in ("run", "before", "after (95 % interval)", "questions", "minutes"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    worse, paths = [], []
    for path in RECIPES:
        artifact, seconds = run(path, console)
        metrics = Metrics.read(artifact / "metrics.json")
        perplexity = metrics.figure("perplexity")
        base, tuned = perplexity.base, perplexity.tuned
        assert base is not None, "a language model has one"
        table.add_row(
            path.stem,
            f"{base.value:.1f}",
            f"{tuned.value:.1f} ({tuned.low:.1f} to {tuned.high:.1f})",
            accuracy(metrics),
            f"{seconds / 60:.1f}",
        )
        paths += [f"  artifact {artifact}", f"  report   {artifact / 'report.html'}"]
        if not metrics.is_better:
            worse.append(path.stem)
    console.rule()
    console.print(table)
    console.print("\n".join(paths), highlight=False, soft_wrap=True)
    console.print(f"{(time.monotonic() - started) / 60:.1f} minutes in all.")
    if worse:
        console.print(
            f"[red]Not significantly better than the base model on held-out pairs: {', '.join(worse)}"
        )
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
