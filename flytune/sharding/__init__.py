"""All shardings, by name. docs/adding-a-sharding.md says what a new one needs."""

import pkgutil
from importlib import import_module
from typing import get_args

from flytune.errors import RecipeError
from flytune.hardware import shape_named
from flytune.recipe import OPTIMIZERS, Recipe, Sharding
from flytune.records import Plan
from flytune.sharding.base import ShardingBase

__all__ = ["ONE_PROCESS", "SHARDINGS", "ShardingBase", "problems", "route", "sharding_of"]


def _classes() -> dict[str, type[ShardingBase]]:
    """List the named classes in the files of this folder, in the order of Sharding's names."""
    named: dict[str, type[ShardingBase]] = {}
    for module in pkgutil.iter_modules(__path__):
        for kind in vars(import_module(f"{__name__}.{module.name}")).values():
            if isinstance(kind, type) and issubclass(kind, ShardingBase) and hasattr(kind, "name"):
                named[kind.name] = kind
    return {name: named[name] for name in get_args(Sharding.model_fields["name"].annotation) if name in named}


SHARDINGS = _classes()

ONE_PROCESS = "-one-process"
"""Suffix of a route on which a shape of several processes runs as one."""


def sharding_of(recipe: Recipe) -> ShardingBase:
    """Return the sharding that a recipe names, bound to the recipe.

    Raises:
        RecipeError: it names none, and no plan has chosen one yet.
    """
    if recipe.sharding.is_auto:
        raise RecipeError(f"recipe {recipe.name}: sharding: auto: a plan must choose it first; name one here")
    return SHARDINGS[recipe.sharding.name](recipe)


def route(plan: Plan) -> str:
    """Return the train task that a plan runs on: its shape's, or the shape's task of one process."""
    is_alone = plan.world_size == 1 < shape_named(plan.shape).world_size
    return plan.shape + (ONE_PROCESS if is_alone else "")


def problems(recipe: Recipe) -> list[str]:
    """List what no shape solves: parts of the recipe that cannot work with its sharding, a line each."""
    sharding, method = sharding_of(recipe), recipe.method
    sentences = sharding.problems()
    if pair := pair_problem(recipe):
        sentences = [pair, *sentences]
    if recipe.sharding.replicas != 1 and not sharding.replicates:
        able = [name for name, other in SHARDINGS.items() if other.replicates]
        sentences.append(
            f"sharding.replicas: {recipe.sharding.replicas} with sharding {sharding.name}, which has none; "
            f"name {' or '.join(able)}, or leave it out"
        )
    if recipe.sharding.sequence_parallel > 1 and not sharding.divides_sequences:
        able = [name for name, other in SHARDINGS.items() if other.divides_sequences]
        sentences.append(
            f"sharding.sequence_parallel: {recipe.sharding.sequence_parallel} with sharding {sharding.name}, "
            f"which is one process; name {' or '.join(able)}, or leave it out"
        )
    optimizer = OPTIMIZERS.get(recipe.training.optim)
    if optimizer and (reason := sharding.optimizer_problem(optimizer)):
        sentences.append(
            f"training.optim: {recipe.training.optim} with sharding {sharding.name}: {reason}; use auto"
        )
    if recipe.training.master_dtype == "bfloat16" and (reason := _no_bfloat16_masters(sharding)):
        sentences.append(f"training.master_dtype: bfloat16: {reason}; leave it out")
    if method.is_pissa and sharding.reads_slices:
        sentences.append(
            f"method.init_lora_weights: {method.init_lora_weights} with sharding {sharding.name}: it takes "
            "singular values out of complete weights, and each process reads only its slices of them; use "
            "ddp or zero3"
        )
    if method.use_dora and method.name != "lora" and sharding.no_quantized_dora:
        sentences.append(
            f"method.use_dora: {method.name} with sharding {sharding.name}: {sharding.no_quantized_dora}; "
            "use fsdp, or method lora"
        )
    return sentences


def _no_bfloat16_masters(sharding: ShardingBase) -> str | None:
    recipe = sharding.recipe
    if recipe.method.name != "full":
        return f"the adapters of {recipe.method.name} are float32, and take little memory"
    if recipe.model.dtype != "bfloat16":
        return f"weights that compute in {recipe.model.dtype} (model.dtype) would be rounded to another dtype"
    return sharding.float32_masters


def pair_problem(recipe: Recipe) -> str | None:
    """Return why method, sharding and offload cannot work together, with the nearest combination that can;
    None if they can."""
    sharding, method, offload = sharding_of(recipe), recipe.method.name, recipe.sharding.offload
    if method in sharding.refuses:
        able = [name for name, other in SHARDINGS.items() if method not in other.refuses]
        # Names are in order of how much they shard, so the nearest alternative is the nearest name.
        order = list(SHARDINGS)
        nearest = min(able, key=lambda name: abs(order.index(name) - order.index(sharding.name)))
        return (
            f"method {method} with sharding {sharding.name}: {sharding.refuses[method]}; nearest that "
            f"works: {nearest}"
        )
    if recipe.method.load_in_8bit and sharding.no_8bit_base:
        able = [
            name for name, other in SHARDINGS.items() if not other.no_8bit_base and offload in other.offloads
        ]
        return (
            f"method.load_in_8bit with sharding {sharding.name}: {sharding.no_8bit_base}; 4 bits (leave "
            f"load_in_8bit out) work with it, and 8 bits with {', '.join(able)}"
        )
    if offload not in sharding.offloads:
        able = [name for name, other in SHARDINGS.items() if offload in other.offloads]
        return (
            f"sharding.offload {offload} with {sharding.name}: it does not do that; nearest that does: "
            f"{able[0]}"
        )
    return None
