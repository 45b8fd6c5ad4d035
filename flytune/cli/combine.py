"""`flytune combine OUT ADDRESS... --weights W...`."""

import argparse
import sys
from pathlib import Path

from flytune.adapters import combining


def run(options: argparse.Namespace) -> int:
    """Combines, and says into what."""
    wishes = {"weights": options.weights, "how": options.how, "r": options.rank, "density": options.density}
    made = combining.combine(options.addresses, Path(options.out), **wishes, seed=options.seed)
    if options.json:
        sys.stdout.write(made.model_dump_json(indent=2) + "\n")
        return 0
    of = " + ".join(f"{source.weight:g} x {source.name} (r {source.r})" for source in made.sources)
    sys.stdout.write(f"{options.out}: {of}, by {made.how}, r {made.r}; not evaluated\n")
    return 0
