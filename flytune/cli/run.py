"""`flytune run RECIPE`, on this machine or on a cluster of Flyte 1 or 2."""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from flytune import files
from flytune.artifacts import kept
from flytune.cli import arguments
from flytune.cluster import control_plane, flyte2_sdk, runs_of_flyte2
from flytune.cluster.executions import Execution
from flytune.console import step_lines
from flytune.doctor import admin, flyte2
from flytune.errors import RecipeError
from flytune.planning import planner
from flytune.recipe import Recipe, inputs, named_files, read_recipe
from flytune.stages import local

_OPTIONS = {"project": "--project", "domain": "--domain", "name": "--name"}
"""pyflyte's options that are handed on as they are."""
_LONGEST_ARGUMENT = 2**17 - 1
"""Bytes that Linux accepts in one argument of a command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe file")
    parser.add_argument(
        "--remote",
        action="store_true",
        help="run it on the cluster of flytekit's config, with the code as it is here",
    )
    parser.add_argument(
        "--flyte2",
        action="store_true",
        help="run it by `flyte run` of Flyte 2, here or with --remote (docs/flyte2.md)",
    )
    parser.add_argument(
        "--shape", help="a row of shapes.yaml, this-machine, or auto, instead of the recipe's hardware.shape"
    )
    arguments.add_setting(parser)
    parser.add_argument(
        "-p", "--project", help="with --remote: Flyte project (default: pyflyte's, flytesnacks)"
    )
    parser.add_argument(
        "-d", "--domain", help="with --remote: Flyte domain (default: pyflyte's, development)"
    )
    parser.add_argument("--name", help="with --remote: name of the execution")
    parser.add_argument(
        "-i",
        "--image",
        action="append",
        help="with --remote: an image of pyflyte's, as NAME=ADDRESS; repeatable",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where results of a run on this machine stay (default: artifacts)"
    )
    sweep = parser.add_mutually_exclusive_group()
    sweep.add_argument(
        "--grid", metavar="JSON", help="run a sweep: {field: values}, or a file of it (docs/sweep.md)"
    )
    sweep.add_argument("--changes", metavar="JSON", help="run a sweep: [{field: value}], or a file of it")


def run(options: argparse.Namespace) -> int:
    """Run a recipe or a sweep of it here; for a cluster print pyflyte's or flyte's command, and become that
    command."""
    recipe = read_recipe(options.recipe, options.set)
    if options.shape:
        recipe = planner.on_shape(recipe, options.shape)
    if options.out:
        _check_out(options, recipe)
        os.environ[kept.VARIABLE] = os.path.abspath(options.out)
    if not options.remote and not options.flyte2:
        return _run_here(options, recipe)
    if options.flyte2 and options.remote:
        # By it the run is found again, whatever becomes of its log.
        options.name = options.name or f"f{uuid.uuid4().hex[:19]}"
    if options.shape or options.set:
        options.recipe = _in_an_argument(recipe)
    arguments = command_of_flyte_2(options) if options.flyte2 else command(options)
    program = _program_of_flyte_2() if options.flyte2 else _program()
    if options.remote:
        _ask_cluster(options)
    step_lines.show(f"$ {shlex.join([Path(program).name, *arguments])}")
    sys.stdout.flush()
    if options.flyte2 and options.remote:
        return _follow([program, *arguments], options)
    # In place of this process: it has the terminal, its signals and its exit code.
    os.execv(program, [program, *arguments])


def _run_here(options: argparse.Namespace, recipe: Recipe) -> int:
    """Run the recipe or the sweep on this machine, without Flyte, and print the address of its result.

    Raises:
        RecipeError: an option needs --remote, or the sweep cannot be read.
    """
    _where(options)
    if options.grid:
        address = local.sweep(recipe, _content(options.grid, "--grid", dict), [])
    elif options.changes:
        address = local.sweep(recipe, {}, _content(options.changes, "--changes", list))
    else:
        address = local.run(recipe)
    sys.stdout.write(f"{address}\n")
    return 0


def _in_an_argument(recipe: Recipe) -> str:
    """Return a recipe as the command line has changed it, for Flyte's command to read: no file of it would
    ever be removed, as this process becomes that command.

    Raises:
        RecipeError: it is too long.
    """
    text = recipe.model_dump_json(exclude_defaults=True)
    if len(text.encode()) > _LONGEST_ARGUMENT:
        raise RecipeError(
            f"--set, --shape: the recipe has more than {_LONGEST_ARGUMENT:,} bytes, too many for a command; "
            "write the changes into its file, and leave these options out"
        )
    return text


def _content(given: str, name: str, kind: type) -> Any:
    """Return a sweep's grid or changes, with the contents of the files that they name."""
    return named_files.with_contents(inputs.content(given, name, kind))


def _check_out(options: argparse.Namespace, recipe: Recipe) -> None:
    """Refuse a folder for results where they are stored elsewhere.

    Raises:
        RecipeError: the run is on a cluster, or the recipe names an address for its one result.
    """
    if options.remote:
        raise RecipeError(
            "--out: a run on a cluster stores its artifact there; leave it out, and `flytune fetch` fetches "
            "it"
        )
    if recipe.publish.address and not (options.grid or options.changes):
        raise RecipeError(
            f"--out: the recipe names publish.address, {recipe.publish.address}: leave one of the two out"
        )


def _ask_cluster(options: argparse.Namespace) -> None:
    """Ask whether there is a cluster that answers, before anything is sent to it.

    Raises:
        RecipeError: there is none, or it does not answer.
    """
    config = flyte2_sdk.config_file()
    if options.flyte2 and config is None:
        raise RecipeError(
            "--flyte2 --remote: no configuration of Flyte 2 names a cluster; `flyte create config --endpoint "
            "HOST` writes one"
        )
    if options.flyte2 and config is not None:
        project, domain = flyte2_sdk.scope(config)
        findings = flyte2.findings(
            config, options.project or project, options.domain or domain, only_reach=True
        )
    else:
        findings = admin.findings(
            control_plane.config_file(),
            options.project or "flytesnacks",
            options.domain or "development",
            only_reach=True,
        )
    problems = [
        f"{finding.what}: {finding.said}; {finding.do}" for finding in findings if finding.level == "FAIL"
    ]
    if problems:
        raise RecipeError(
            "\n".join(["--remote: nothing was sent:", *problems, "`flytune doctor --remote` says more"])
        )


def _follow(command: list[str], options: argparse.Namespace) -> int:
    """Submit a run of Flyte 2, and return its exit code once the run has ended: 0 if it has succeeded.

    `flyte run --follow` shows the log for as long as the backend streams it, half a minute on the open one,
    and fails then.
    """
    name, config = options.name, flyte2_sdk.config_file()
    try:
        code = subprocess.run(command, check=False).returncode
        if config is None:
            return code
        project, domain = flyte2_sdk.scope(config)
        run = Execution(options.project or project, options.domain or domain, name)
        if not runs_of_flyte2.is_known(config, run):
            return code
        outcome = runs_of_flyte2.follow(config, run, step_lines.show)
    except KeyboardInterrupt:
        step_lines.show(
            f"run {name} goes on: `flyte get action {name}` shows it, `flyte abort run {name}` ends it, and "
            f"`flytune fetch {name} OUT` fetches what it has made"
        )
        return 130
    step_lines.show(f"run {name}: {outcome.text}")
    if outcome.is_success:
        step_lines.show(f"`flytune fetch {name} OUT` fetches what it has made")
    return int(not outcome.is_success)


def command(options: argparse.Namespace) -> list[str]:
    """Return the arguments of pyflyte.

    Raises:
        RecipeError: there is no clone with the workflows.
    """
    # The code travels with the run: --copy all, as images have none.
    where = ["--remote", "--copy", "all", *_where(options)]
    workflow, given = _inputs(options)
    return ["run", *where, str(_workflows() / f"{workflow}.py"), workflow, "--recipe", options.recipe, *given]


def command_of_flyte_2(options: argparse.Namespace) -> list[str]:
    """Return the arguments of Flyte 2's `flyte`.

    Raises:
        RecipeError: an option needs --remote; or there is no clone with the tasks.
    """
    # The code travels with a run on a cluster, as images have none.
    where = [*(["--copy-style", "all", "--follow"] if options.remote else ["--local"]), *_where(options)]
    task, inputs = _inputs(options)
    folder = _workflows("flyte2")
    if folder.is_absolute():
        # `flyte run` takes absolute paths below the working directory only, and imports from there.
        where += ["--root-dir", str(folder.parent)]
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(folder.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    return ["run", *where, os.path.relpath(folder / f"{task}.py"), task, "--recipe", options.recipe, *inputs]


def _where(options: argparse.Namespace) -> list[str]:
    """Return the options that say where on a cluster to run, and with which images.

    Raises:
        RecipeError: there are some, and --remote is not given.
    """
    named = [(flag, getattr(options, name)) for name, flag in _OPTIONS.items()]
    named += [("--image", image) for image in options.image or []]
    where = [part for flag, value in named if value is not None for part in (flag, value)]
    if where and not options.remote:
        raise RecipeError(f"{where[0]}: says where on a cluster to run; give --remote too, or leave it out")
    return where


def _inputs(options: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the name of the workflow, and its inputs beside the recipe."""
    given = {
        name: getattr(options, name) for name in ("grid", "changes") if getattr(options, name) is not None
    }
    return "sweep" if given else "finetune", [
        part for name, value in given.items() for part in (f"--{name}", value)
    ]


def _workflows(folder: str = "workflows") -> Path:
    """Return the folder of the workflows in the clone."""
    if (root := files.clone()) is None:
        raise RecipeError(
            f"workflows/finetune.py: neither in {Path.cwd()} nor beside the package "
            f"({Path(files.__file__).parents[1]}): a run on a cluster needs a clone of Flytune with "
            "workflows/, tasks/ and images/; clone its repository, `make install` there, and run this in it"
        )
    return Path(folder) if root == Path.cwd() else root / folder


def _program_of_flyte_2() -> str:
    beside = Path(sys.executable).with_name("flyte")
    program = str(beside) if beside.is_file() else shutil.which("flyte")
    if program is None:
        raise RecipeError(
            f"flyte: Flyte 2's command is not installed beside {sys.executable}, nor on PATH; pip install -e "
            "'.[flyte2]' in the clone installs it"
        )
    # Crash reports to its makers are on by default.
    os.environ.setdefault("FLYTE_DISABLE_TELEMETRY", "1")
    return program


def _program() -> str:
    beside = Path(sys.executable).with_name("pyflyte")
    program = str(beside) if beside.is_file() else shutil.which("pyflyte")
    if program is None and sys.version_info >= (3, 13):
        raise RecipeError(
            "pyflyte: flytekit 1.16 cannot be installed on Python 3.13 or later: use 3.11 or 3.12 for runs; "
            "plan, xray and convert need no flytekit"
        )
    if program is None:
        raise RecipeError(
            f"pyflyte: not installed beside {sys.executable}, nor on PATH; `make install` in the clone "
            "installs it"
        )
    return program
