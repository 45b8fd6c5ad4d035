"""`flytune combine OUT ADDRESS... --weights W...`."""

import argparse
import sys
from pathlib import Path

from flytune.adapters import combining
from flytune.artifacts import opening


def run(options: argparse.Namespace) -> int:
    """Combine the adapters, and describe the new one."""
    settings = {"weights": options.weights, "how": options.how, "r": options.rank, "density": options.density}
    consent = opening.Consent(options.trust_remote_code, options.base)
    made = combining.combine(options.addresses, Path(options.out), **settings, seed=options.seed, consent=consent)
    sys.stderr.write(f"base model: {made.base}{f'@{made.revision}' if made.revision else ''}\n")
    if options.json:
        sys.stdout.write(made.model_dump_json(indent=2) + "\n")
        return 0
    parts = " + ".join(f"{source.weight:g} x {source.name} (r {source.r})" for source in made.sources)
    sys.stdout.write(f"{options.out}: {parts}, combined by {made.how}, r {made.r}; not evaluated\n")
    return 0
