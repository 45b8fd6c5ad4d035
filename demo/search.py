"""`make demo-embed`: an embedding model for a search from recipe to artifact, here, without hub or GPU."""

import sys
from pathlib import Path

from demo import inputs
from demo.__main__ import run_one
from flytune.records import Metrics
from flytune.sentences import counted

RECIPE = Path("recipes/demo-embed.yaml")


def verdict(metrics: Metrics) -> str:
    """Return the share of held-out queries whose own document is among the nearest ten, before and after, as
    a sentence."""
    recall = metrics.figure("recall_at_10")
    assert recall.base is not None, "the base has vectors too"
    texts = counted(metrics.samples, "held-out query", "held-out queries")
    return (
        f"own document among the 10 nearest, of {texts}: before {recall.base.value:.0%}, after "
        f"{recall.tuned.value:.0%} ({recall.tuned.low:.0%} to {recall.tuned.high:.0%})"
    )


def main() -> int:
    """Make the inputs, run the recipe, and show the result; return 1 if the search is not better than
    before."""
    worse = "The search is not significantly better than before."
    return run_one(RECIPE, "one run of an embedding model", inputs.make_searched, verdict, worse)


if __name__ == "__main__":
    sys.exit(main())
