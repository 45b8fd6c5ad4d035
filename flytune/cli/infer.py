"""`flytune infer ARTIFACT --prompts FILE`."""

import argparse
import sys
import tempfile
from pathlib import Path

from flytune.artifacts import fetch, opening
from flytune.cli import arguments
from flytune.data.bad_rows import BAD_ROWS
from flytune.errors import RecipeError, escaped
from flytune.files import new_output
from flytune.inference import batch
from flytune.models import Generation
from flytune.sentences import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_answering(parser, max_new_tokens=128)
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help="JSON Lines, JSON, CSV or Parquet with messages, prompt or question; a classifier's have texts "
        "as in its training",
    )
    parser.add_argument("--out", metavar="FILE", help="a new file for the answers (default: the terminal)")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=ADDRESS",
        help="another adapter on the same base, for rows that name it in their column adapter; repeatable",
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, help="prompts that are answered together (default: 8)"
    )
    parser.add_argument(
        "--max-bad-fraction", type=float, default=0.0, help="fraction of rows that may be bad (default: 0)"
    )


def run(options: argparse.Namespace) -> int:
    """Answer a file of prompts on this machine; write the answers to --out, or to the terminal."""
    prompts = Path(options.prompts)
    if not options.out and prompts.suffix == ".parquet":
        raise RecipeError(
            "--out: answers to a Parquet file are one, too, which a terminal cannot show; name a new file"
        )
    generation = Generation(
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        max_bad_fraction=options.max_bad_fraction,
    )
    adapters = _adapters(options.adapter)
    artifact = fetch.local_folder(options.artifact)
    others = {name: fetch.local_folder(address) for name, address in adapters.items()}
    consent = opening.Consent(options.trust_remote_code, options.base)
    with tempfile.TemporaryDirectory(prefix="flytune-infer-") as scratch:
        answered = Path(scratch) / "answers"
        summary = batch.answer_file(prompts, artifact, others, generation, answered, consent)
        counts = f"{counted(summary.rows, 'prompt')}, {counted(summary.answer_tokens, 'token')} of answers"
        sys.stderr.write(f"{counts}, {summary.stopped:,} ended by the model\n")
        (answers,) = answered.glob("answers.*")
        if options.out:
            with new_output(Path(options.out)) as temporary:
                temporary.write_bytes(answers.read_bytes())
            sys.stdout.write(f"{options.out}\n")
        else:
            arguments.show_answers(answers.read_text(encoding="utf-8"))
        if summary.bad:
            left_out = (answered / BAD_ROWS).read_text(encoding="utf-8")
            sys.stderr.write(f"{counted(summary.bad, 'row')} not answered:\n{escaped(left_out)}")
    return 0


def _adapters(given: list[str]) -> dict[str, str]:
    """Return the addresses of NAME=ADDRESS by their names."""
    adapters: dict[str, str] = {}
    for text in given:
        name, is_named, address = text.partition("=")
        if not is_named or not address:
            raise RecipeError(
                f"--adapter {text:.200}: give NAME=ADDRESS; rows name it in their column adapter"
            )
        if name in adapters:
            raise RecipeError(f"--adapter {name:.200}: given twice; give each adapter a name of its own")
        adapters[name] = address
    return adapters
