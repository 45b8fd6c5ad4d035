"""`flytune doctor`."""

import argparse
import json
import sys
from collections.abc import Iterator

from rich.console import Console

from flytune.doctor import Finding, admin, kube, laptop
from flytune.errors import RecipeError
from flytune.hardware.cluster import load_cluster
from flytune.hardware.shapes import Shape, load_shapes, shape_named
from flytune.planning import evaluation_shape, planner
from flytune.recipe.recipe import Recipe

_STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


def run(options: argparse.Namespace) -> int:
    """Shows each finding as it is made; 1 where something fails."""
    if options.recipe and not options.remote:
        raise RecipeError(f"doctor {options.recipe}: a recipe's shape is looked for on a cluster; add --remote")
    console = Console(soft_wrap=True, highlight=False)
    made = []
    for finding in _findings(options):
        made.append(finding)
        if not options.json:
            console.print(f"[{_STYLES[finding.level]}]{finding.level:4}[/] {finding.what:20} ", end="")
            console.print(finding.said, markup=False)
            if finding.do:
                console.print(f"{'':25} -> {finding.do}", markup=False)
    if options.json:
        sys.stdout.write(json.dumps([finding.model_dump() for finding in made], indent=2) + "\n")
    return int(any(finding.level == "FAIL" for finding in made))


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    config = admin.config_file()
    if not options.remote:
        yield from laptop.findings()
        yield from admin.local(config)
        return
    yield from admin.look(config, options.project, options.domain, only_reach=options.reach)
    if not options.reach:
        yield from kube.look(f"{options.project}-{options.domain}", _shapes(options.recipe), load_cluster())


def _shapes(recipe_file: str | None) -> tuple[Shape, ...]:
    """Return the shapes that a recipe is planned on, of training and evaluation; all shapes without a recipe."""
    if recipe_file is None:
        return load_shapes()
    recipe = Recipe.from_yaml(recipe_file)
    plan = planner.make(recipe)
    named = dict.fromkeys((plan.shape, evaluation_shape.shape_for(recipe, plan).name))
    return tuple(shape_named(name) for name in named)
