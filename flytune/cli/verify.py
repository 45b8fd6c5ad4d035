"""`flytune verify ADDRESS ARTIFACT`."""

import argparse
import sys

from flytune.artifacts import opening
from flytune.errors import printable
from flytune.serving import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address",
        help="http://HOST:PORT of vLLM or llama.cpp's server; a key is taken from FLYTUNE_API_KEY",
    )
    parser.add_argument(
        "artifact",
        help="a folder, fsspec address or hf://owner/name with the artifact; its weights are not read",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="the model at the server (default: the only one, or the run's name)"
    )
    parser.add_argument(
        "--bound",
        type=float,
        metavar="NATS",
        help="largest divergence in nats per token, of a model that is quantized on purpose "
        "(default: a bound of each log-probability, by the artifact's dtype)",
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python files of the tokenizer's own (default: refuse)",
    )


def run(options: argparse.Namespace) -> int:
    """Say whether an endpoint answers as an artifact's model; return 1 if it does not."""
    consent = opening.Consent(options.trust_remote_code)
    result = verify(options.address, options.artifact, options.model, options.bound, consent)
    text = result.model_dump_json(indent=2) if options.json else printable(result.sentence)
    sys.stdout.write(f"{text}\n")
    return 0 if result.is_served else 1
