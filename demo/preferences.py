"""`make demo-dpo`: preference tuning from a recipe to a stored artifact, on this machine, without a hub or a
GPU."""

import sys
from pathlib import Path

from demo import inputs
from demo.__main__ import run_one
from flytune.records import Metrics
from flytune.sentences import counted

RECIPE = Path("recipes/demo-dpo.yaml")


def verdict(found: Metrics) -> str:
    """Return base and tuned model's preferences of the held-out pairs as a sentence."""
    preferred, accuracy, margin = (
        found.figure(name) for name in ("chosen_preferred", "reward_accuracy", "reward_margin")
    )
    assert preferred.base is not None, "the base has answers"
    return (
        f"chosen sentence of {counted(found.samples, 'held-out pair')} more probable: base "
        f"{preferred.base.value:.0%}, tuned {preferred.tuned.value:.0%}; larger reward "
        f"{accuracy.tuned.value:.0%} ({accuracy.tuned.low:.0%} to {accuracy.tuned.high:.0%}), margin "
        f"{margin.tuned.value:.3f} ({margin.tuned.low:.3f} to {margin.tuned.high:.3f})"
    )


def is_better(found: Metrics) -> bool:
    """Return whether accuracy rose on held-out pairs: of rewards, above the half that the reference has,
    interval and all.

    The shares of more probable answers, a few pairs apart, must only not fall.
    """
    preferred = found.figure("chosen_preferred")
    assert preferred.difference is not None, "both models have the figure"
    rewards = [found.figure(name).outcome for name in ("reward_accuracy", "reward_margin")]
    return rewards == ["better", "better"] and preferred.difference.value >= 0


def main() -> int:
    """Make the inputs, run the recipe, and show the result; return 1 if the held-out accuracy did not
    rise."""
    worse = "The held-out accuracy did not rise."
    return run_one(RECIPE, "one preference-tuning run", inputs.make_preferences, verdict, worse, is_better)


if __name__ == "__main__":
    sys.exit(main())
