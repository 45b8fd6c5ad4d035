"""`flytune combine OUT ADDRESS... --weights W...`."""

import argparse
import sys
from pathlib import Path

from flytune.adapters import combining


def run(options: argparse.Namespace) -> int:
    """Combine the adapters, and describe the new one."""
    settings = {"weights": options.weights, "how": options.how, "r": options.rank, "density": options.density}
    made = combining.combine(options.addresses, Path(options.out), **settings, seed=options.seed)
    if options.json:
        sys.stdout.write(made.model_dump_json(indent=2) + "\n")
        return 0
    parts = " + ".join(f"{source.weight:g} x {source.name} (r {source.r})" for source in made.sources)
    sys.stdout.write(f"{options.out}: {parts}, combined by {made.how}, r {made.r}; not evaluated\n")
    return 0
