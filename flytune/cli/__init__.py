"""The command line, all but running, which is pyflyte's: `flytune plan`, `doctor`, `accepted` and the others below.

Each command is a module beside this one, with a function `run`.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from rich.console import Console

from flytune import caches
from flytune.errors import FlytuneError
from flytune.recipe.recipe import json_schema


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code, 1 when the recipe has to be mended first."""
    parser = argparse.ArgumentParser(prog="flytune", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="say whether a recipe fits, on what, and why; nothing is started")
    plan.add_argument("recipe", help="a recipe file")
    plan.add_argument("--json", action="store_true", help="the plan as JSON")
    plan.add_argument(
        "--shape", help="a row of shapes.yaml instead of the recipe's; auto: rank all of them, laid out in every way"
    )
    plan.add_argument("--by", choices=("price", "time"), default="price", help="what --shape auto ranks by")
    plan.add_argument(
        "--samples", type=int, help="that training will have, for hours and price; estimated for local JSON Lines"
    )
    plan.add_argument("--dry-run", action="store_true", help="confirm GPU memory by running the model's code on empty tensors")
    looked = commands.add_parser("xray", help="show what would be trained on, token by token; needs the tokenizer only")
    looked.add_argument("recipe", help="a recipe file")
    looked.add_argument("--rows", type=int, default=1000, help="read only the first so many (of each source)")
    looked.add_argument("--out", help="the page; .xray/NAME.html when not given")
    looked.add_argument("--open", action="store_true", help="in a browser")
    selftest = commands.add_parser("selftest", help="hold every method and sharding against plain training, on this machine")
    selftest.add_argument("--pairs", default="", help="only these, as in full/zero2,lora/zero3/cpu (method/sharding/offload)")
    selftest.add_argument("--json", action="store_true", help="the matrix as JSON")
    selftest.add_argument("--keep", metavar="DIR", help="a new folder in which every run's export and log stay")
    merge = commands.add_parser("merge", help="merge an artifact's adapter into its base, and say what that changes")
    merge.add_argument("artifact", help="a folder, fsspec address or hf://owner/name of an adapter's artifact")
    merge.add_argument("--out", required=True, help="a new folder for the merged model")
    merge.add_argument("--json", action="store_true", help="what was measured as JSON")
    listed = commands.add_parser("adapters", help="list the artifacts in a store: base, data, perplexity, when stored")
    listed.add_argument("address", help="a folder or fsspec address that holds artifacts")
    listed.add_argument("--json", action="store_true", help="as JSON")
    fetch = commands.add_parser("fetch", help="an artifact into a folder, checked, laid out as it was stored")
    fetch.add_argument(
        "address", help="an execution (its id, or its address in the console), an fsspec address, or hf://owner/name@REVISION"
    )
    fetch.add_argument("out", help="a new folder")
    _on_cluster(fetch, "of an execution's id")
    combine = commands.add_parser("combine", help="make one adapter of several on the same base")
    combine.add_argument("out", help="a new folder for the combined artifact")
    combine.add_argument("addresses", nargs="+", help="folders or fsspec addresses of artifacts")
    combine.add_argument("--weights", nargs="+", type=float, help="one for each; 1 when not given")
    combine.add_argument("--how", default="cat", help="PEFT's combination_type; cat: exact, as large as all together")
    combine.add_argument("--rank", type=int, help="of svd and *_svd; the largest of theirs when not given")
    combine.add_argument("--density", type=float, help="of ties and dare: the share of values that is kept")
    combine.add_argument("--seed", type=int, default=0, help="of what dare drops")
    combine.add_argument("--json", action="store_true", help="what was made as JSON")
    calibrate = commands.add_parser("calibrate", help="learn from runs: a factor per shape that later plans are multiplied by")
    calibrate.add_argument("artifacts", nargs="+", help="folders that hold artifacts")
    accepted = commands.add_parser("accepted", help="which model is accepted, and all decisions that led there")
    accepted.add_argument("address", help="the folder or fsspec address that scheduled runs keep it at")
    accepted.add_argument("--rollback", action="store_true", help="accept the model before it again")
    accepted.add_argument("--reason", default="rolled back by hand", help="of the rollback, for the history")
    accepted.add_argument("--json", action="store_true", help="the decisions as JSON")
    doctor = commands.add_parser("doctor", help="check this machine, or with --remote a cluster, and say what to do")
    doctor.add_argument("recipe", nargs="?", help="with --remote: a recipe, whose shape alone is looked for among the nodes")
    doctor.add_argument("--remote", action="store_true", help="the cluster of flytekit's config and of the kubeconfig")
    _on_cluster(doctor, "with --remote")
    doctor.add_argument("--reach", action="store_true", help="with --remote: only whether the cluster answers")
    doctor.add_argument("--json", action="store_true", help="the findings as JSON")
    commands.add_parser("schema", help="the JSON schema of recipe files")
    options = parser.parse_args(arguments)
    if options.command == "schema":
        sys.stdout.write(json_schema())
        return 0
    try:
        caches.set_up(in_pod=False)
        # A command loads what it needs: a plan is there in less time than selftest's imports take.
        return int(import_module(f"flytune.cli.{options.command}").run(options))
    except FlytuneError as error:
        return told(error)
    except OSError as error:
        if (refused := caches.home_error(error)) is None:
            raise
        return told(refused)


def _on_cluster(command: argparse.ArgumentParser, when: str) -> None:
    command.add_argument("-p", "--project", default="flytesnacks", help=f"Flyte's project, {when}")
    command.add_argument("-d", "--domain", default="development", help=f"Flyte's domain, {when}")


def told(error: Exception) -> int:
    """Prints an error that is the user's to mend; returns the exit code for it."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"{type(error).__name__}: {error}", markup=False)
    return 1
