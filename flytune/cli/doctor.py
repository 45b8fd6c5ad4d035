"""`flytune doctor`."""

import argparse
import json
import sys
from collections.abc import Iterator

from rich.console import Console

from flytune.doctor import Finding, admin, kube, laptop
from flytune.errors import RecipeError
from flytune.hardware import Shape, load_cluster, load_shapes, shape_named
from flytune.planning import evaluation_shape, planner
from flytune.recipe import Recipe

_STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


def run(options: argparse.Namespace) -> int:
    """Show each finding at once; return 1 if one is FAIL."""
    if options.recipe and not options.remote:
        raise RecipeError(f"doctor {options.recipe}: a recipe's shapes are checked on a cluster; add --remote")
    console = Console(soft_wrap=True, highlight=False)
    findings = []
    for finding in _findings(options):
        findings.append(finding)
        if not options.json:
            console.print(f"[{_STYLES[finding.level]}]{finding.level:4}[/] {finding.what:20} ", end="")
            console.print(finding.said, markup=False)
            if finding.do:
                console.print(f"{'':25} -> {finding.do}", markup=False)
    if options.json:
        sys.stdout.write(json.dumps([finding.model_dump() for finding in findings], indent=2) + "\n")
    return int(any(finding.level == "FAIL" for finding in findings))


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    config = admin.config_file()
    if not options.remote:
        yield from laptop.findings()
        yield from admin.local(config)
        return
    yield from admin.findings(config, options.project, options.domain, only_reach=options.reach)
    if not options.reach:
        yield from kube.findings(f"{options.project}-{options.domain}", _shapes(options.recipe), load_cluster())


def _shapes(recipe_file: str | None) -> tuple[Shape, ...]:
    """Return the shapes of a recipe's training and evaluation; without a recipe, all shapes."""
    if recipe_file is None:
        return load_shapes()
    recipe = Recipe.from_yaml(recipe_file)
    plan = planner.make(recipe)
    named = dict.fromkeys((plan.shape, evaluation_shape.shape_for(recipe, plan).name))
    return tuple(shape_named(name) for name in named)
