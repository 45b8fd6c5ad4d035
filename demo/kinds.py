"""`make demo-classify`: a classifier of texts from recipe to artifact, here, without hub or GPU."""

import sys
from pathlib import Path

from demo import inputs
from demo.__main__ import run_one
from flytune.records import Metrics
from flytune.sentences import counted

RECIPE = Path("recipes/demo-classify.yaml")


def verdict(found: Metrics) -> str:
    """Return the share of held-out texts that get the right label as a sentence."""
    accuracy = found.figure("accuracy")
    assert accuracy.neutral is not None, "it follows from the held-out texts"
    return (
        f"right labels of {counted(found.samples, 'held-out sentence')}: always the same label "
        f"{accuracy.neutral:.0%}, tuned {accuracy.tuned.value:.0%} ({accuracy.tuned.low:.0%} to "
        f"{accuracy.tuned.high:.0%})"
    )


def main() -> int:
    """Make the inputs, run the recipe, and show the result; return 1 if the model is no better than one
    label for all texts."""
    worse = "The labels are no better than the same one for all texts."
    return run_one(RECIPE, "one run of a classifier", inputs.make_kinds, verdict, worse)


if __name__ == "__main__":
    sys.exit(main())
