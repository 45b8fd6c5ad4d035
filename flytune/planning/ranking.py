"""Every way to run a recipe's method on the shapes there are: which is cheapest, which fastest, which the nearest that fits."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from flytune.hardware.shapes import Shape
from flytune.models.geometry import Geometry
from flytune.planning import candidates
from flytune.planning.candidates import Fit
from flytune.recipe.recipe import Recipe
from flytune.sharding import SHARDINGS

A_SHAPE = 2
"""Ways of a shape that a ranking keeps."""
By = Literal["price", "time"]


@dataclass(frozen=True, slots=True)
class Ranking:
    """What fits, best first, at most two ways a shape; each with its best micro batch."""

    fits: list[Fit]
    ways: int
    """That fit."""
    looked_at: int
    """Candidates, those that do not fit included."""
    seconds: float


def rank(recipe: Recipe, shapes: Sequence[Shape], geometry: Geometry, by: By) -> Ranking:
    """All feasible pairs of sharding and offload, with and without checkpointing, each micro batch, on all shapes that the
    recipe's wishes allow: those that fit, by the price of a token or by the time it takes.

    A tight fit comes behind all that fit well. Shapes that accelerators.yaml has no row of have no time; they come last.
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
    """The recipe under every sharding, offload and checkpointing that can work at all; its own first."""
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
                "sharding": {"name": name, "offload": offload},
                "training": {"activation_checkpointing": checkpointing},
            },
        )
        if not candidates.impossible(changed, geometry):
            yield changed


def changes(recipe: Recipe, other: Recipe) -> str:
    """What one says otherwise than the other, as it is written into a recipe; empty where nothing is."""
    said = []
    if recipe.method.name != other.method.name:
        said.append(f"method: {other.method.name}")
    if recipe.sharding != other.sharding:
        offload = f", offload: {other.sharding.offload}" if other.sharding.offload != "none" else ""
        said.append(f"sharding: {{name: {other.sharding.name}{offload}}}" if offload else f"sharding: {other.sharding.name}")
    if recipe.training.activation_checkpointing != other.training.activation_checkpointing:
        said.append(f"training.activation_checkpointing: {str(other.training.activation_checkpointing).lower()}")
    if recipe.data.max_length != other.data.max_length:
        said.append(f"data.max_length: {other.data.max_length}")
    if recipe.hardware != other.hardware:
        said.append(f"hardware.shape: {other.hardware.shape}")
    return ", ".join(said)


def change_that_fits(recipe: Recipe, shapes: Sequence[Shape], geometry: Geometry) -> str:
    """The smallest change under which the same recipe fits, in a sentence.

    A change costs by what it changes for its user: how the run is laid out (nothing that is learned), which machines are
    rented, how long samples may be, what is trained. Of equals the cheapest shape.
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
                fit = candidates.on(layout, shape, geometry)
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
    """The recipe's, and those that need less."""
    order = ["full", "lora", "qlora"]
    return order[order.index(recipe.method.name) :]


def _changed(recipe: Recipe, change: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """The recipe with some fields of some sections changed; a `name` stands for the whole section."""
    content = recipe.model_dump()
    for section, fields in change.items():
        content[section] = dict(fields) if "name" in fields else content[section] | fields
    return Recipe.model_validate(content)
