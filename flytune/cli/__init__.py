"""Plan and run fine-tunes, inspect data, check machines, and manage artifacts.

Each command is a module in this package, with a function `run`.
"""

import argparse
import difflib
import errno
import io
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from flytune import __version__, addresses, caches, files, garbage_collection, launch_variables
from flytune.cli import arguments
from flytune.console import error_lines, output
from flytune.errors import FlytuneError, RecipeError, chain

__all__ = ["main"]

OBJECTIVES = ("sft", "dpo", "kto", "reward", "grpo")
"""Objectives of a recipe, which this module does not import: `flytune --help` would wait for them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code, 1 for errors that the user must correct."""
    parser = _Parser(prog="flytune", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"flytune {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    init = commands.add_parser("init", help="write a recipe for your own data; asks only what the data does not say")
    init.add_argument("data", help="a file, folder or address with samples, or a data set on the hub, owner/name")
    init.add_argument("--out", default="recipe.yaml", metavar="FILE", help="a new file (default: recipe.yaml)")
    init.add_argument("--base", metavar="MODEL", help="the base model, a hub id or a folder")
    init.add_argument("--on", metavar="ROW", help="this-machine, a row of shapes.yaml, or auto: the cheapest row")
    init.add_argument("--aim", metavar="AIM", help="what matters most: price, time or quality")
    init.add_argument("--yes", action="store_true", help="take the default of each question that no option answers")
    plan = commands.add_parser("plan", help="show whether a recipe fits, on which hardware, and why; starts nothing")
    plan.add_argument("recipe", nargs="?", help="a recipe file")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument(
        "--compare", nargs=2, metavar="RECIPE", help="what changes in memory, time and price from one recipe to another"
    )
    plan.add_argument(
        "--data", metavar="FOLDER", help="a folder of prepared data, whose lengths and order of batches are planned with"
    )
    plan.add_argument("--svg", metavar="FILE", help="write a picture of memory by phase into a new file, too")
    plan.add_argument(
        "--shape", help="a row of shapes.yaml instead of the recipe's; auto: rank all of them with every sharding"
    )
    plan.add_argument("--by", choices=("price", "time"), help="order of --shape auto (default: price)")
    plan.add_argument(
        "--samples",
        type=int,
        help="number of training samples, for hours and price (default: counted in the recipe's local files)",
    )
    plan.add_argument(
        "--solve",
        metavar="FIELD",
        help="largest value that fits of data.max_length, training.per_device_train_batch_size, method.r or num_hidden_layers; "
        "gpus: the fewest; price or hours: the least within --max-hours or --max-price",
    )
    plan.add_argument("--max-hours", type=float, help="hardware.max_hours instead of the recipe's")
    plan.add_argument("--max-price", type=float, help="hardware.max_price instead of the recipe's")
    _setting(plan)
    plan.add_argument("--dry-run", action="store_true", help="confirm GPU memory by running the model's code on empty tensors")
    run = commands.add_parser(
        "run", help="run a recipe on this machine, or on a cluster by the command of Flyte, which it prints"
    )
    run.add_argument("recipe", help="a recipe file")
    run.add_argument(
        "--remote", action="store_true", help="run it on the cluster of flytekit's config, with the code as it is here"
    )
    run.add_argument(
        "--flyte2", action="store_true", help="run it by `flyte run` of Flyte 2, here or with --remote (docs/flyte2.md)"
    )
    run.add_argument("--shape", help="a row of shapes.yaml, this-machine, or auto, instead of the recipe's hardware.shape")
    _setting(run)
    run.add_argument("-p", "--project", help="with --remote: Flyte project (default: pyflyte's, flytesnacks)")
    run.add_argument("-d", "--domain", help="with --remote: Flyte domain (default: pyflyte's, development)")
    run.add_argument("--name", help="with --remote: name of the execution")
    run.add_argument("-i", "--image", action="append", help="with --remote: an image of pyflyte's, as NAME=ADDRESS; repeatable")
    run.add_argument("--out", metavar="DIR", help="where results of a run on this machine stay (default: artifacts)")
    sweep = run.add_mutually_exclusive_group()
    sweep.add_argument("--grid", metavar="JSON", help="run a sweep: {field: values}, or a file of it (docs/sweep.md)")
    sweep.add_argument("--changes", metavar="JSON", help="run a sweep: [{field: value}], or a file of it")
    convert = commands.add_parser("convert", help="make a recipe of a file of axolotl, LLaMA-Factory or TRL")
    convert.add_argument("file", help="a YAML of axolotl, LLaMA-Factory or TRL, or a script with their command line")
    convert.add_argument("--output", help="a new file for the recipe (default: the terminal)")
    convert.add_argument("--gpus", type=int, help="number of GPUs that the tool was started on (default: what the file says)")
    convert.add_argument("--objective", choices=OBJECTIVES, help="that of a TRL YAML, which names none")
    xray = commands.add_parser("xray", help="show the training data token by token on a page; needs only the tokenizer")
    xray.add_argument("recipe", help="a recipe file")
    _setting(xray)
    xray.add_argument("--rows", type=int, default=1000, help="number of first rows to read of each source (default: 1000)")
    xray.add_argument("--out", help="path of the page (default: .xray/NAME.html)")
    xray.add_argument("--force", action="store_true", help="replace the file at --out, even if it is not a page of xray")
    xray.add_argument("--check", action="store_true", help="exit with 1 if a check would stop the run, for CI (default: 0)")
    xray.add_argument("--open", action="store_true", help="open the page in a browser")
    selftest = commands.add_parser("selftest", help="compare every method and sharding with plain training, on this machine")
    selftest.add_argument("--pairs", default="", help="only these pairs, as method/sharding/offload: full/zero2,lora/zero3/cpu")
    selftest.add_argument("--json", action="store_true", help="print the matrix as JSON")
    selftest.add_argument("--keep", metavar="DIR", help="a new folder in which to keep the exports and logs of all runs")
    merge = commands.add_parser("merge", help="merge an artifact's adapter into its base model, and measure the difference")
    merge.add_argument("artifact", help="a folder, fsspec address or hf://owner/name with the artifact of an adapter")
    merge.add_argument("--out", required=True, help="a new folder for the merged model")
    merge.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="type of the merged weights (default: auto, the base's)",
    )
    merge.add_argument("--json", action="store_true", help="print the measurements as JSON")
    _on_base(merge)
    chat = commands.add_parser("chat", help="ask an artifact's model on this machine; answers are shown as it writes them")
    _answering(chat, max_new_tokens=1024)
    chat.add_argument("--system", metavar="TEXT", help="the system message (default: that of the training)")
    infer = commands.add_parser("infer", help="answer a file of prompts with an artifact's model on this machine")
    _answering(infer, max_new_tokens=128)
    infer.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help="JSON Lines, JSON, CSV or Parquet with messages, prompt or question",
    )
    infer.add_argument("--out", metavar="FILE", help="a new file for the answers (default: the terminal)")
    infer.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=ADDRESS",
        help="another adapter on the same base, for rows that name it in their column adapter; repeatable",
    )
    infer.add_argument("--batch-size", type=int, default=8, help="prompts that are answered together (default: 8)")
    infer.add_argument("--max-bad-fraction", type=float, default=0.0, help="fraction of rows that may be bad (default: 0)")
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
    adapters = commands.add_parser("adapters", help="list artifacts with base model, data, held-out figures, time and size")
    adapters.add_argument("address", help="a folder or fsspec address with artifacts")
    adapters.add_argument("--json", action="store_true", help="print the list as JSON")
    fetch = commands.add_parser(
        "fetch", help="download an artifact, or what else an execution has made, into a folder, and verify its files"
    )
    fetch.add_argument(
        "address", help="an execution (its id, or its address in the console), an fsspec address, or hf://owner/name@REVISION"
    )
    fetch.add_argument("out", help="a new folder")
    fetch.add_argument(
        "--point", metavar="NAME", help="of a sweep: the artifact of this point (default: table, chart, best recipe)"
    )
    fetch.add_argument("--failed", action="store_true", help="of a failed execution: the report of the failure, and all decks")
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
    approve = commands.add_parser("approve", help="publish or accept an artifact that a run has stored for your approval")
    approve.add_argument("artifact", help="the folder or fsspec address of the stored artifact, as the run has printed it")
    approve.add_argument("--sha256", help="hash of the artifact that you have looked at (default: that of the run's question)")
    approve.add_argument("--refuse", metavar="REASON", help="refuse it instead, for this reason")
    approve.add_argument("--by", help="your name, for the record (default: that of this machine's user)")
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
    schema = commands.add_parser("schema", help="print the JSON schema of recipe files")
    schema.add_argument("--plan", action="store_true", help="print the schema of what `flytune plan --json` prints")
    if sys.stdout is None:
        return error_lines.show(RecipeError("the standard output is closed: open it (>FILE, or >/dev/null)"))
    garbage_collection.skip_at_exit()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files need not be UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(parser, argv)
    except FlytuneError as error:
        # Libraries are loaded late, so that an error of what they read may be caused by a lack of memory.
        return error_lines.show(_memory_error(error.__cause__) or error)
    except ModuleNotFoundError as error:
        if (missing := _missing(error)) is None:
            raise
        return error_lines.show(missing)
    except BrokenPipeError:  # the reader of a pipe has ended, such as `head`
        _drop_unwritten()
        return 1
    except OSError as error:
        _drop_unwritten()
        if (refused := caches.home_error(error) or _file_error(error) or _memory_error(error)) is None:
            raise
        return error_lines.show(refused)
    except Exception as error:
        if (refused := _memory_error(error)) is not None:
            return error_lines.show(refused)
        # Libraries in Rust raise no OSError.
        if (full := files.full_error(error)) is None:
            raise
        return error_lines.show(_full(getattr(full, "strerror", None) or " ".join(str(full).split())[:200]))


def _run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    try:
        options = parser.parse_args(argv)
    except SystemExit:
        sys.stdout.flush()  # of --help; an error at the exit would be a traceback
        raise
    try:
        os.getcwd()  # libraries end the process, or find nothing, without one
    except FileNotFoundError:
        raise RecipeError("the working folder was deleted: change to one that exists (cd)") from None
    _refuse_credentials(options)
    arguments.check(options)
    if options.command != "schema":
        caches.set_up(in_pod=False)
        launch_variables.clear(in_pod=False)
    output.install()
    # Each command imports its own module, because imports such as selftest's take longer than a plan.
    code = int(import_module(f"flytune.cli.{options.command}").run(options))
    sys.stdout.flush()
    return code


class _Parser(argparse.ArgumentParser):
    """Parser whose help is an error where it cannot be written; argparse says nothing then, and ends with 0.

    For a word that is no choice it names the nearest one.
    """

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(str(value), [str(choice) for choice in action.choices or ()], n=1)
            if near:
                error.message = f"{value!r}: unknown; did you mean {near[0]}?"
            raise

    def _print_message(self, message: str, file: Any = None) -> None:
        if message and (file := file or sys.stderr) is not None:
            file.write(message)
            file.flush()


def _drop_unwritten() -> None:
    """Drop text that the standard output does not take; Python would try to write it again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


_EXTRAS = {
    "data": "datasets fsspec gcsfs huggingface_hub jinja2 numpy pyarrow s3fs tokenizers transformers",
    "report": "matplotlib",
    "train": "accelerate bitsandbytes deepspeed peft safetensors torch trl",
    "harness": "lm_eval",
    "demo": "gguf",
}
"""Libraries by the extra of pyproject.toml that installs them."""


def _missing(error: ModuleNotFoundError) -> RecipeError | None:
    """Return the error of a library that is not installed, with what installs it; None if it is none of the extras'."""
    name = (error.name or "").partition(".")[0]
    if name in ("flytekit", "flyteidl"):
        return RecipeError(
            "flytekit: not installed, and this command asks Flyte: use Python 3.11 or 3.12, as flytekit 1.16 does"
        )
    extra = next((extra for extra, names in _EXTRAS.items() if name in names.split()), None)
    return RecipeError(f"{name}: not installed: `pip install 'flytune[{extra}]'` installs it") if extra else None


def _memory_error(error: BaseException | None) -> RecipeError | None:
    """Return the error of a process that gets no more memory, in words; None if neither an error nor a cause says that."""
    for link in chain(error):
        if isinstance(link, MemoryError) or getattr(link, "errno", None) == errno.ENOMEM or _NO_MEMORY.search(str(link)):
            return RecipeError("out of memory: this process gets no more: free some, or raise its limit (ulimit -v)")
    return None


_NO_MEMORY = re.compile(r"failed to map segment|[Cc]an(?:not|'t) allocate memory|std::bad_alloc|can't start new thread")
"""Words of the system, torch, and Python without a class of their own."""


def _full(said: str) -> RecipeError:
    return RecipeError(f"{said}: make room in {tempfile.gettempdir()} (TMPDIR), or where the command writes to")


def _file_error(error: OSError) -> RecipeError | None:
    """Return the error of a file that cannot be read or written, in words; None if it names no file."""
    if error.filename is None and error.errno in files.FULL:
        return _full(str(error.strerror))
    if error.filename is None or error.strerror is None:
        return None
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else f"file {error.filename}"
    return RecipeError(f"{name:.300}: {error.strerror}; name a path that can be read, and written where a command writes to it")


def _answering(command: argparse.ArgumentParser, max_new_tokens: int) -> None:
    command.add_argument(
        "artifact", help="a folder, fsspec address or hf://owner/name with an artifact, or a merged model's folder"
    )
    command.add_argument(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        help=f"maximum tokens of an answer (default: {max_new_tokens:,})",
    )
    command.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    command.add_argument(
        "--top-p", type=float, default=1.0, help="share of the likeliest tokens that is drawn from (default: 1)"
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the drawing (default: 0)")
    _on_base(command)


def _setting(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of the recipe with another value, as training.learning_rate=1e-4; repeatable",
    )


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
