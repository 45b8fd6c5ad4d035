"""`flytune gguf ARTIFACT --out FILE`."""

import argparse
import sys
from pathlib import Path

from flytune.adapters import gguf
from flytune.artifacts import fetch, opening
from flytune.cli import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "artifact",
        help="a folder, fsspec address or hf://owner/name with an artifact, or a merged model's folder",
    )
    parser.add_argument("--out", required=True, help="a new file")
    parser.add_argument(
        "--outtype",
        default="auto",
        help="type of the weights: f32, f16, bf16, q8_0 ... (default: auto, 16 bits)",
    )
    parser.add_argument(
        "--converter",
        help="llama.cpp's convert_hf_to_gguf.py (default: FLYTUNE_GGUF_CONVERTER, or the one on PATH)",
    )
    arguments.add_base(parser)


def run(options: argparse.Namespace) -> int:
    """Write the artifact's model as a GGUF file."""
    consent = opening.Consent(options.trust_remote_code, options.base)
    gguf.convert(
        fetch.local_folder(options.artifact), Path(options.out), options.outtype, options.converter, consent
    )
    sys.stdout.write(f"{options.out}\n")
    return 0
