"""`flytune merge ARTIFACT --out DIR`."""

import argparse
import sys
from pathlib import Path

from rich.table import Table

from flytune.adapters import merging
from flytune.artifacts import fetch, opening
from flytune.cli import arguments
from flytune.console import tables
from flytune.errors import printable
from flytune.models.probe import PROMPTS
from flytune.sentences import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "artifact", help="a folder, fsspec address or hf://owner/name with the artifact of an adapter"
    )
    parser.add_argument("--out", required=True, help="a new folder for the merged model")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="type of the merged weights (default: auto, the base's)",
    )
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    arguments.add_base(parser)


def run(options: argparse.Namespace) -> int:
    """Merge the adapter, and show the difference of each candidate."""
    artifact = fetch.local_folder(options.artifact)
    consent = opening.Consent(options.trust_remote_code, options.base)
    sys.stderr.write(printable(f"base model: {opening.describe_base(artifact, consent)}\n"))
    merge = merging.merge(artifact, Path(options.out), consent, options.dtype)
    if options.json:
        sys.stdout.write(merge.model_dump_json(indent=2) + "\n")
        return 0
    title = (
        f"merged compared with trained: {merge.base} in {merge.dtype}, {counted(merge.tokens, 'token')} of "
        f"{counted(len(PROMPTS), 'prompt')}"
    )
    table = Table(title=tables.plain(title), title_justify="left")
    table.add_column("adapter merged into")
    titles = ("KL, nats per token", "worst token", "same next token", "")
    if merge.of_vectors:
        titles = ("1 - cosine similarity", "worst prompt", "same nearest prompt", "")
    for title in titles:
        table.add_column(title, justify="right")
    for candidate in merge.candidates:
        numbers = f"{candidate.divergence:.2e}", f"{candidate.worst:.2e}", f"{candidate.agreement:.1%}"
        table.add_row(candidate.onto, *numbers, "kept" if candidate is merge.candidates[0] else "")
    tables.show(table, tables.console())
    sys.stdout.write(f"{options.out}\n")
    return 0
