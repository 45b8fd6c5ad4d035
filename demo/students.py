"""`make demo-distill`: a random model learns from a trained one, from recipe to artifact, here."""

import sys
from pathlib import Path

from demo import inputs
from demo.__main__ import run_one
from flytune.records import Metrics
from flytune.sentences import counted

RECIPE = Path("recipes/demo-distill.yaml")


def verdict(found: Metrics) -> str:
    """Return the perplexities of the student before and after as a sentence."""
    perplexity = found.figure("perplexity")
    assert perplexity.base is not None, "a language model has one"
    return (
        f"perplexity of {counted(found.samples, 'held-out answer')}: student before "
        f"{perplexity.base.value:,.0f}, after {perplexity.tuned.value:,.0f} "
        f"({perplexity.tuned.low:,.0f} to {perplexity.tuned.high:,.0f})"
    )


def main() -> int:
    """Make the inputs, run the recipe, and show the result; return 1 if the student is not better than
    before."""
    worse = "The student is not significantly better than before."
    return run_one(RECIPE, "one run of distillation", inputs.make_student, verdict, worse)


if __name__ == "__main__":
    sys.exit(main())
