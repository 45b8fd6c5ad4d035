"""`flytune doctor`."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator

from rich.console import Console

from flytune.cli import arguments
from flytune.cluster import control_plane, flyte2_sdk, folders
from flytune.console import tables
from flytune.doctor import Finding, admin, finding, flyte2, kube, laptop
from flytune.dryrun import confirm
from flytune.errors import FlytuneError, RecipeError
from flytune.hardware import SecretKey, Secrets, load_cluster, load_shapes, shape_named
from flytune.planning import planner, stage_shapes
from flytune.recipe import read_recipe

_STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", nargs="?", help="with --remote: check only the nodes for the shapes of this recipe"
    )
    parser.add_argument(
        "--remote", action="store_true", help="check the cluster of flytekit's config and of the kubeconfig"
    )
    arguments.add_cluster(parser, "with --remote")
    parser.add_argument(
        "--reach", action="store_true", help="with --remote: check only that the cluster answers"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Show each finding at once; return 1 if one is FAIL."""
    if options.recipe and not options.remote:
        raise RecipeError(
            f"doctor {options.recipe}: a recipe's shapes are checked on a cluster; add --remote"
        )
    console = Console(soft_wrap=True, highlight=False)
    findings = []
    for line in _findings(options):
        findings.append(line)
        if not options.json:
            console.print(
                f"[{_STYLES[line.level]}]{line.level:4}[/] {tables.plain(line.what):20} ",
                end="",
            )
            console.print(line.said, markup=False)
            if line.do:
                console.print(f"{'':25} -> {line.do}", markup=False)
    if options.json:
        sys.stdout.write(json.dumps([finding.model_dump() for finding in findings], indent=2) + "\n")
    return int(any(finding.level == "FAIL" for finding in findings))


def _secrets() -> list[SecretKey]:
    """Return the secrets that cluster.yaml names; none where it cannot be read, which is a finding of its
    own."""
    try:
        return load_cluster().secrets.all
    except FlytuneError:
        return []


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    second = flyte2_sdk.config_file()
    if not options.remote:
        yield from laptop.findings()
        if second is not None:
            yield finding.ok("flyte config", f"{second}: Flyte 2")
        elif importlib.util.find_spec("flytekit") is None:
            yield finding.ok("flyte config", "not read: flytekit is not installed")
        else:
            yield from admin.local(control_plane.config_file())
        return
    if second is not None:
        yield from flyte2.findings(second, options.project, options.domain, options.reach, _secrets())
    else:
        config = control_plane.config_file()
        yield from admin.findings(config, options.project, options.domain, only_reach=options.reach)
    if options.reach:
        return
    read = list(laptop.hardware_files())
    yield from read
    if any(earlier.level == "FAIL" for earlier in read):
        return
    namespace, cluster = f"{options.project}-{options.domain}", load_cluster()
    if second is not None:
        # Flyte 2 has secrets of its own, which were checked above.
        cluster = cluster.model_copy(update={"secrets": Secrets()})
    if options.recipe is None:
        yield from kube.findings(namespace, load_shapes(), cluster, with_settings=second is None)
        return
    try:
        recipe = read_recipe(options.recipe)
        plan = planner.make(recipe, trace=confirm.best_fit)
        names = dict.fromkeys((plan.shape, stage_shapes.evaluation_shape(recipe, plan).name))
    except FlytuneError as error:
        reason = " ".join(str(error).split())
        yield finding.fail("recipe", reason, f"correct it; `flytune plan {options.recipe}` checks it here")
        return
    rows = tuple(shape_named(name) for name in names)
    yield from kube.findings(namespace, rows, cluster, with_settings=second is None)
    if problems := folders.problems(recipe, cluster, plan.shape, uploaded=False):
        yield finding.fail(
            "folders", "; ".join(problems), "change the recipe or cluster.yaml: a run would be refused"
        )
    else:
        yield finding.ok("folders", f"the recipe names none that the pods of {plan.shape} lack")
