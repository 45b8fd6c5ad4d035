"""`flytune combine OUT ADDRESS... --weights W...`."""

import argparse
import sys
from pathlib import Path

from flytune.adapters import combining
from flytune.artifacts import opening
from flytune.cli import arguments
from flytune.errors import printable
from flytune.sentences import at_revision


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", help="a new folder for the combined artifact")
    parser.add_argument("addresses", nargs="+", help="folders or fsspec addresses of artifacts")
    parser.add_argument("--weights", nargs="+", type=float, help="one weight for each artifact (default: 1)")
    parser.add_argument(
        "--how",
        default="cat",
        help="PEFT's combination_type (default: cat, which is exact; its rank is the sum of all ranks)",
    )
    parser.add_argument(
        "--rank", type=int, help="rank for svd and *_svd (default: the largest rank of the adapters)"
    )
    parser.add_argument("--density", type=float, help="share of values that ties and dare keep")
    parser.add_argument("--seed", type=int, default=0, help="seed for dare (default: 0)")
    parser.add_argument("--json", action="store_true", help="print a description of the new adapter as JSON")
    arguments.add_base(parser)


def run(options: argparse.Namespace) -> int:
    """Combine the adapters, and describe the new one."""
    settings = {"weights": options.weights, "how": options.how, "r": options.rank, "density": options.density}
    consent = opening.Consent(options.trust_remote_code, options.base)
    combination = combining.combine(
        options.addresses, Path(options.out), **settings, seed=options.seed, consent=consent
    )
    sys.stderr.write(printable(f"base model: {at_revision(combination.base, combination.revision)}\n"))
    if options.json:
        sys.stdout.write(combination.model_dump_json(indent=2) + "\n")
        return 0
    parts = " + ".join(f"{source.weight:g} x {source.name} (r {source.r})" for source in combination.sources)
    sys.stdout.write(
        f"{options.out}: {parts}, combined by {combination.how}, r {combination.r}; not evaluated\n"
    )
    return 0
