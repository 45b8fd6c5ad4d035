"""`make demo-grpo`: training with verifiable rewards from a recipe to an artifact, on this machine, without a
hub or a GPU."""

import sys
from pathlib import Path

from demo import inputs
from demo.__main__ import run_one
from flytune.records import Metrics
from flytune.sentences import counted

RECIPE = Path("recipes/demo-grpo.yaml")


def verdict(found: Metrics) -> str:
    """Return base and tuned model's rewards on the held-out prompts as a sentence."""
    reward = found.figure("reward")
    base, gain = reward.base, reward.difference
    assert base is not None, "the base answers too"
    assert gain is not None, "both models answer the same prompts"
    return (
        f"mean reward of {counted(found.samples, 'held-out prompt')}: base {base.value:.2f}, tuned "
        f"{reward.tuned.value:.2f}; difference {gain.value:.2f} ({gain.low:.2f} to {gain.high:.2f})"
    )


def main() -> int:
    """Make the inputs, run the recipe, and show the result; return 1 if the held-out reward did not rise."""
    worse = "The held-out reward did not rise."
    return run_one(RECIPE, "one run with verifiable rewards", inputs.make_sums, verdict, worse)


if __name__ == "__main__":
    sys.exit(main())
