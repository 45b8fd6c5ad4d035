"""`flytune convert FILE`."""

import argparse
import errno
import os
import sys
from pathlib import Path

from flytune import files
from flytune.conversion import convert

OBJECTIVES = ("sft", "dpo", "kto", "reward", "grpo", "classify", "distill")
"""Objectives of a recipe."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", help="a YAML of axolotl, LLaMA-Factory or TRL, or a script with their command line"
    )
    parser.add_argument("--output", help="a new file for the recipe (default: the terminal)")
    parser.add_argument(
        "--gpus", type=int, help="number of GPUs that the tool was started on (default: what the file says)"
    )
    parser.add_argument("--objective", choices=OBJECTIVES, help="that of a TRL YAML, which names none")


def run(options: argparse.Namespace) -> int:
    """Print the recipe, or write it to a new file."""
    text = convert(options.file, options.gpus, options.objective)
    if options.output is None:
        sys.stdout.write(text)
        return 0
    out = Path(options.output)
    if out.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out))
    with files.new_output(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{options.output}\n")
    return 0
