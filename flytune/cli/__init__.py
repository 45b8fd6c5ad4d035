"""Plan fine-tuning runs, inspect data, check machines, and manage artifacts. Runs are started with pyflyte.

Each command is a module in this package, with a function `run`.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from flytune import addresses, caches, garbage_collection
from flytune.cli import arguments
from flytune.errors import FlytuneError, RecipeError, printable

__all__ = ["main", "print_error"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code, 1 for errors that the user must correct."""
    parser = argparse.ArgumentParser(prog="flytune", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="show whether a recipe fits, on which hardware, and why; starts nothing")
    plan.add_argument("recipe", help="a recipe file")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument(
        "--shape", help="a row of shapes.yaml instead of the recipe's; auto: rank all of them with every sharding"
    )
    plan.add_argument("--by", choices=("price", "time"), default="price", help="order of --shape auto (default: price)")
    plan.add_argument(
        "--samples", type=int, help="number of training samples, for hours and price; estimated for local JSON Lines files"
    )
    plan.add_argument("--dry-run", action="store_true", help="confirm GPU memory by running the model's code on empty tensors")
    xray = commands.add_parser("xray", help="show the training data token by token on a page; needs only the tokenizer")
    xray.add_argument("recipe", help="a recipe file")
    xray.add_argument("--rows", type=int, default=1000, help="number of first rows to read of each source (default: 1000)")
    xray.add_argument("--out", help="path of the page (default: .xray/NAME.html)")
    xray.add_argument("--force", action="store_true", help="replace the file at --out, even if it is no page of xray")
    xray.add_argument("--open", action="store_true", help="open the page in a browser")
    selftest = commands.add_parser("selftest", help="compare every method and sharding with plain training, on this machine")
    selftest.add_argument("--pairs", default="", help="only these pairs, as method/sharding/offload: full/zero2,lora/zero3/cpu")
    selftest.add_argument("--json", action="store_true", help="print the matrix as JSON")
    selftest.add_argument("--keep", metavar="DIR", help="a new folder in which to keep the exports and logs of all runs")
    merge = commands.add_parser("merge", help="merge an artifact's adapter into its base model, and measure the difference")
    merge.add_argument("artifact", help="a folder, fsspec address or hf://owner/name with the artifact of an adapter")
    merge.add_argument("--out", required=True, help="a new folder for the merged model")
    merge.add_argument("--json", action="store_true", help="print the measurements as JSON")
    _on_base(merge)
    gguf = commands.add_parser("gguf", help="write an artifact's model as a GGUF file, with llama.cpp's converter")
    gguf.add_argument(
        "artifact", help="a folder, fsspec address or hf://owner/name with an artifact, or a merged model's folder"
    )
    gguf.add_argument("--out", required=True, help="a new file")
    gguf.add_argument(
        "--outtype", default="auto", help="type of the weights: f32, f16, bf16, q8_0 ... (default: auto, 16 bits)"
    )
    gguf.add_argument(
        "--converter", help="llama.cpp's convert_hf_to_gguf.py (default: FLYTUNE_GGUF_CONVERTER, or the one on PATH)"
    )
    _on_base(gguf)
    adapters = commands.add_parser("adapters", help="list artifacts with base model, data, perplexity, time and size")
    adapters.add_argument("address", help="a folder or fsspec address with artifacts")
    adapters.add_argument("--json", action="store_true", help="print the list as JSON")
    fetch = commands.add_parser("fetch", help="download an artifact into a folder, and verify its files")
    fetch.add_argument(
        "address", help="an execution (its id, or its address in the console), an fsspec address, or hf://owner/name@REVISION"
    )
    fetch.add_argument("out", help="a new folder")
    _on_cluster(fetch, "for an execution's id")
    combine = commands.add_parser("combine", help="combine several adapters on the same base model into one")
    combine.add_argument("out", help="a new folder for the combined artifact")
    combine.add_argument("addresses", nargs="+", help="folders or fsspec addresses of artifacts")
    combine.add_argument("--weights", nargs="+", type=float, help="one weight for each artifact (default: 1)")
    combine.add_argument(
        "--how", default="cat", help="PEFT's combination_type (default: cat, which is exact; its rank is the sum of all ranks)"
    )
    combine.add_argument("--rank", type=int, help="rank for svd and *_svd (default: the largest rank of the adapters)")
    combine.add_argument("--density", type=float, help="share of values that ties and dare keep")
    combine.add_argument("--seed", type=int, default=0, help="seed for dare (default: 0)")
    combine.add_argument("--json", action="store_true", help="print a description of the new adapter as JSON")
    _on_base(combine)
    calibrate = commands.add_parser("calibrate", help="learn memory factors for later plans from finished runs")
    calibrate.add_argument("artifacts", nargs="+", help="folders with artifacts")
    accepted = commands.add_parser("accepted", help="show the accepted model and the history of decisions; or roll back")
    accepted.add_argument("address", help="the folder or fsspec address with the decisions of scheduled runs")
    accepted.add_argument("--rollback", action="store_true", help="accept the previously accepted model again")
    accepted.add_argument("--reason", default="rolled back by hand", help="reason for the rollback, for the history")
    accepted.add_argument("--json", action="store_true", help="print the decisions as JSON")
    reproduce = commands.add_parser("reproduce", help="run an artifact's recipe again, and compare the result with it")
    reproduce.add_argument("artifact", help="a folder, fsspec address or hf://owner/name with an artifact")
    reproduce.add_argument("--out", help="a new folder for the second run (default: .reproduce/NAME)")
    reproduce.add_argument("--remote", action="store_true", help="print the command that runs it on the cluster")
    reproduce.add_argument("--with", dest="other", metavar="ARTIFACT", help="compare with this artifact instead of a new run")
    reproduce.add_argument("--json", action="store_true", help="print the comparison as JSON")
    reproduce.add_argument("--trust-remote-code", action="store_true", help="run code that the artifact's recipe names")
    doctor = commands.add_parser("doctor", help="check this machine, or with --remote a cluster, and give advice")
    doctor.add_argument("recipe", nargs="?", help="with --remote: check only the nodes for the shapes of this recipe")
    doctor.add_argument("--remote", action="store_true", help="check the cluster of flytekit's config and of the kubeconfig")
    _on_cluster(doctor, "with --remote")
    doctor.add_argument("--reach", action="store_true", help="with --remote: check only that the cluster answers")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    commands.add_parser("schema", help="print the JSON schema of recipe files")
    options = parser.parse_args(argv)
    garbage_collection.skip_at_exit()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files need not be UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        _refuse_credentials(options)
        arguments.check(options)
        if options.command != "schema":
            caches.set_up(in_pod=False)
        # Each command imports its own module, because imports such as selftest's take longer than a plan.
        return int(import_module(f"flytune.cli.{options.command}").run(options))
    except FlytuneError as error:
        return print_error(error)
    except BrokenPipeError:  # the reader of a pipe has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:
        if (refused := caches.home_error(error) or _file_error(error)) is None:
            raise
        return print_error(refused)


def _file_error(error: OSError) -> RecipeError | None:
    """Return the error of a file that cannot be read or written, in words; None if it names no file."""
    if error.filename is None or error.strerror is None:
        return None
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else f"file {error.filename}"
    return RecipeError(f"{name:.300}: {error.strerror}; name a path that can be read, and written where a command writes to it")


def _on_base(command: argparse.ArgumentParser) -> None:
    command.add_argument("--base", help="the base model, instead of the one that the artifact names")
    command.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python files of the model's own (default: refuse)",
    )


def _refuse_credentials(options: argparse.Namespace) -> None:
    """Refuse credentials in arguments: they would go into records, and into the shell's history."""
    for name, value in vars(options).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                addresses.check(text, f"flytune {options.command}: {name}", RecipeError)


def _on_cluster(command: argparse.ArgumentParser, when: str) -> None:
    command.add_argument("-p", "--project", default="flytesnacks", help=f"Flyte project, {when} (default: flytesnacks)")
    command.add_argument("-d", "--domain", default="development", help=f"Flyte domain, {when} (default: development)")


def print_error(error: Exception) -> int:
    """Print an error that the user must correct; return the exit code for it."""
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False, emoji=False).print(
        printable(f"{type(error).__name__}: {addresses.redact(str(error))}"), markup=False
    )
    return 1
