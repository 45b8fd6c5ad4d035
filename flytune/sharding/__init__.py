"""All shardings, by name. A new one is a file beside this one, and its name in flytune.recipe.sections.Sharding."""

import pkgutil
from importlib import import_module
from typing import get_args

from flytune.hardware.shapes import shape_named
from flytune.recipe.recipe import Recipe
from flytune.recipe.sections import Sharding
from flytune.records.plan import Plan
from flytune.sharding.base import Strategy


def _found() -> dict[str, Strategy]:
    """An object of each named class in the files beside this one, in the order of Sharding's names."""
    named: dict[str, Strategy] = {}
    for module in pkgutil.iter_modules(__path__):
        for kind in vars(import_module(f"{__name__}.{module.name}")).values():
            if isinstance(kind, type) and issubclass(kind, Strategy) and hasattr(kind, "name"):
                named[kind.name] = kind()
    return {name: named[name] for name in get_args(Sharding.model_fields["name"].annotation)}


STRATEGIES = _found()

# What a route's name ends in where a shape of several processes runs as one.
ONE_PROCESS = "-one-process"


def route(recipe: Recipe, plan: Plan) -> str:
    """The train task that a plan runs on: its shape, or the shape's task of one process."""
    shape = shape_named(plan.shape)
    return plan.shape + (ONE_PROCESS if strategy_of(recipe).processes(shape) < shape.processes else "")


def strategy_of(recipe: Recipe) -> Strategy:
    """The strategy that a recipe's sharding names."""
    return STRATEGIES[recipe.sharding.name]


def pair_problem(recipe: Recipe) -> str | None:
    """Why method, sharding and offload cannot work together, with the nearest combination that can; None if they can."""
    strategy, method, offload = strategy_of(recipe), recipe.method.name, recipe.sharding.offload
    if method in strategy.refuses:
        works = [name for name, other in STRATEGIES.items() if method not in other.refuses]
        # Nearest is the one beside it in the list above: they are in order of how much they shard.
        order = list(STRATEGIES)
        nearest = min(works, key=lambda name: abs(order.index(name) - order.index(strategy.name)))
        return f"method {method} with sharding {strategy.name}: {strategy.refuses[method]}; nearest that works: {nearest}"
    if recipe.publish.every_save and not strategy.saves_whole:
        able = [name for name, other in STRATEGIES.items() if other.saves_whole and method not in other.refuses]
        return (
            f"publish.every_save with sharding {strategy.name}: its checkpoints hold each process's part of the weights, "
            f"and no whole ones; leave it out (the finished run is published), or use one of: {', '.join(able)}"
        )
    if recipe.publish.every_save and not recipe.checkpoints.save_steps:
        return "publish.every_save publishes what checkpoints hold, and none are written: set checkpoints.save_steps"
    if offload not in strategy.offloads:
        able = [name for name, other in STRATEGIES.items() if offload in other.offloads]
        return f"sharding.offload {offload} with {strategy.name}: it has no such offload; nearest that has: {able[0]}"
    return None
