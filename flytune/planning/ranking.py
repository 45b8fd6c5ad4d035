"""All ways to run a recipe's method on all shapes, by price or time, and the smallest change that makes a recipe fit."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from flytune.hardware import Shape
from flytune.models import Geometry
from flytune.planning import candidates
from flytune.planning.candidates import Fit
from flytune.recipe import Recipe
from flytune.sharding import SHARDINGS

A_SHAPE = 2
"""Number of ways that a ranking keeps of each shape."""
By = Literal["price", "time"]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Ways that fit, best first, at most two for each shape, each with its best micro batch."""

    fits: list[Fit]
    ways: int
    """Number of ways that fit."""
    looked_at: int
    """Number of candidates, including those that do not fit."""
    seconds: float


def rank(recipe: Recipe, shapes: Sequence[Shape], geometry: Geometry, by: By) -> Ranking:
    """Rank all feasible pairs of sharding and offload, with and without checkpointing, and all micro batches, on all shapes
    that the recipe's wishes allow, by the price or the time of a token.

    Tight fits follow all others. Shapes whose GPU has no row in accelerators.yaml have no time, and come last.
    """
    started, looked_at, best = time.monotonic(), 0, []
    for changed, shape in product(_layouts(recipe, geometry), candidates.wished(recipe, shapes)):
        fits = candidates.each(changed, shape, geometry)
        if isinstance(fits, str):
            looked_at += 1
            continue
        looked_at += len(fits)
        if held := [fit for fit in fits if fit.share <= 1]:
            best.append(min(held, key=lambda fit: _cost(fit, by)))
    ordered = sorted(best, key=lambda fit: _cost(fit, by))
    shown: Counter[str] = Counter()
    few = []
    for fit in ordered:
        shown[fit.shape.name] += 1
        if shown[fit.shape.name] <= A_SHAPE:
            few.append(fit)
    return Ranking(few, len(ordered), looked_at, time.monotonic() - started)


def _cost(fit: Fit, by: By) -> tuple[Any, ...]:
    slow = -fit.tokens_per_second
    first = (fit.price_per_token, slow) if by == "price" else (slow, fit.price_per_token)
    # Of equals, the cheaper machine with the more room.
    return (not fit.tokens_per_second, fit.is_tight, *first, fit.shape.total_price_per_hour, fit.share)


def _layouts(recipe: Recipe, geometry: Geometry) -> Iterator[Recipe]:
    """List the recipe with each sharding, offload and checkpointing that can work, its own first."""
    own = (recipe.sharding.name, recipe.sharding.offload, recipe.training.activation_checkpointing)
    ways = [
        (name, offload, checkpointing)
        for name, sharding in SHARDINGS.items()
        for offload in sharding.offloads
        for checkpointing in (True, False)
    ]
    for name, offload, checkpointing in sorted(ways, key=lambda way: way != own):
        changed = _changed(
            recipe,
            {
                "sharding": _sharding(recipe, name, offload),
                "training": {"activation_checkpointing": checkpointing},
            },
        )
        if not candidates.impossible(changed, geometry):
            yield changed


def _sharding(recipe: Recipe, name: str, offload: str) -> Mapping[str, Any]:
    """Return a sharding; the recipe's own with its options."""
    own = recipe.sharding
    return own.model_dump() if (name, offload) == (own.name, own.offload) else {"name": name, "offload": offload}


def changes(recipe: Recipe, other: Recipe) -> str:
    """Return the fields in which another recipe differs, as they are written into a recipe; empty if none does."""
    fields = []
    if recipe.method.name != other.method.name:
        fields.append(f"method: {other.method.name}")
    if recipe.sharding != other.sharding:
        offload = f", offload: {other.sharding.offload}" if other.sharding.offload != "none" else ""
        fields.append(f"sharding: {{name: {other.sharding.name}{offload}}}" if offload else f"sharding: {other.sharding.name}")
    if recipe.training.activation_checkpointing != other.training.activation_checkpointing:
        fields.append(f"training.activation_checkpointing: {str(other.training.activation_checkpointing).lower()}")
    if recipe.data.max_length != other.data.max_length:
        fields.append(f"data.max_length: {other.data.max_length}")
    if recipe.hardware != other.hardware:
        fields.append(f"hardware.shape: {other.hardware.shape}")
    return ", ".join(fields)


def change_that_fits(recipe: Recipe, shapes: Sequence[Shape], geometry: Geometry) -> str:
    """Return the smallest change with which the recipe fits, as a sentence.

    The size of a change is what it means to its user, from small to large: the sharding (the result is the same), the machines,
    the length of samples, the method. Among equals the cheapest shape.
    """
    found: list[tuple[int, float, str]] = []
    halves = [recipe.data.max_length >> times for times in range(4) if recipe.data.max_length >> times >= 128]
    for method, length, anywhere in product(_methods(recipe), halves or [recipe.data.max_length], (False, True)):
        cost = 8 * _methods(recipe).index(method) + 4 * halves.index(length) + 3 * anywhere if halves else 0
        if found and cost >= min(found)[0]:
            continue
        start = _changed(recipe, {"data": {"max_length": length}} | ({"hardware": _ANYWHERE} if anywhere else {}))
        if method != recipe.method.name:
            start = _changed(start, {"method": {"name": method}})
        for layout in _layouts(start, geometry):
            more = (layout.sharding.name != recipe.sharding.name) + (layout.sharding.offload != recipe.sharding.offload)
            for shape in candidates.wished(layout, shapes):
                fit = candidates.best_fit(layout, shape, geometry)
                if isinstance(fit, Fit):
                    price = shape.total_price_per_hour
                    found.append(
                        (
                            cost + more,
                            price,
                            f"{changes(recipe, layout) or 'the recipe as it is'} (on {shape.name}, ${price:.2f} an hour)",
                        )
                    )
    if found:
        return f"it would fit with {min(found)[2]}"
    return "no change of method, sharding, length or shape makes it fit; add a larger shape to shapes.yaml"


_ANYWHERE: Mapping[str, Any] = {"shape": "auto", "max_price_per_hour": None}


def _methods(recipe: Recipe) -> list[str]:
    """List the recipe's method, and those that need less memory."""
    order = ["full", "lora", "qlora"]
    return order[order.index(recipe.method.name) :]


def _changed(recipe: Recipe, change: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """Return the recipe with some fields of some sections changed; a `name` replaces the complete section."""
    content = recipe.model_dump()
    for section, fields in change.items():
        content[section] = dict(fields) if "name" in fields else content[section] | fields
    return Recipe.model_validate(content)
