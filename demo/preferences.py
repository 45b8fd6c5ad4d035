"""`make demo-dpo`: preference tuning from a recipe to a stored artifact, on this machine, without a hub or a GPU."""

import os
import sys
from pathlib import Path

from rich.console import Console

from demo import inputs
from demo.__main__ import HOME, run
from flytune.records import Metrics, Preference

RECIPE = Path("recipes/demo-dpo.yaml")


def verdict(found: Preference) -> str:
    """Return base and tuned model's preferences of the held-out pairs as a sentence."""
    return (
        f"chosen sentence of {found.pairs} held-out pairs more probable: base {found.base:.0%}, tuned {found.tuned:.0%}; "
        f"larger reward {found.accuracy:.0%} ({found.accuracy_low:.0%} to {found.accuracy_high:.0%}), margin "
        f"{found.margin:.3f} ({found.margin_low:.3f} to {found.margin_high:.3f})"
    )


def is_better(found: Preference) -> bool:
    """Return whether accuracy rose on held-out pairs: of rewards, above the half that the reference has, interval and all.

    The shares of more probable answers, a few pairs apart, must only not fall.
    """
    return found.accuracy_low > 0.5 and found.margin_low > 0 and found.tuned >= found.base


def main() -> int:
    """Make the inputs, run the recipe, and show the result; return 1 if the held-out accuracy did not rise."""
    console = Console()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    console.print("[bold]Flytune demo:[/] one preference-tuning run on this machine.")
    inputs.make_preferences(HOME)
    artifact, seconds = run(RECIPE, console)
    found = Metrics.read(artifact / "metrics.json").preference
    assert found is not None, "its rows are pairs"
    console.rule()
    console.print(f"{verdict(found)}; {seconds / 60:.1f} minutes", highlight=False, soft_wrap=True)
    console.print(f"  artifact {artifact}\n  report   {artifact / 'report.html'}", highlight=False, soft_wrap=True)
    if not is_better(found):
        console.print("[red]The held-out accuracy did not rise.")
    return 0 if is_better(found) else 1


if __name__ == "__main__":
    sys.exit(main())
