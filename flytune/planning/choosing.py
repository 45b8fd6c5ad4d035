"""The choices that a recipe leaves to the plan: the shape of the cheapest run, and the sharding."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flytune.errors import RecipeError
from flytune.hardware import Shape, this_machine
from flytune.planning import candidates, ranking
from flytune.planning.candidates import Fit
from flytune.recipe import Hardware, Recipe, Sharding
from flytune.sentences import counted
from flytune.sharding import SHARDINGS, sharding_of
from training_estimates.sizes import Geometry


class Timed(NamedTuple):
    """A way with the time and the price of the run; most: the likely maximum."""

    fit: Fit
    hours: float
    most_hours: float

    @classmethod
    def of(cls, fit: Fit, steps: int) -> "Timed":
        """Return a way whose time is known, with the hours of so many steps."""
        assert fit.time is not None
        slowest, _ = fit.likely
        hours = fit.time.seconds * steps / 3600
        return cls(fit, hours, hours * fit.time.tokens_per_second / slowest)

    @property
    def price(self) -> float:
        return self.hours * self.fit.shape.total_price_per_hour

    @property
    def most_price(self) -> float:
        return self.most_hours * self.fit.shape.total_price_per_hour

    def excess(self, wish: Hardware) -> float:
        """Return its likely maximum over the limit that it exceeds most; at most 1 if it is within max_hours
        and max_price."""
        hours = self.most_hours / wish.max_hours if wish.max_hours is not None else 0.0
        price = self.most_price / wish.max_price if wish.max_price is not None else 0.0
        return max(hours, price)

    def said(self) -> str:
        """Return hours and price in words."""
        return (
            f"{self.fit.shape.name} with {self.fit.recipe.sharding.name}: {self.hours:.3g} hours (likely up "
            f"to {self.most_hours:.3g}) for ${self.price:,.2f} (up to ${self.most_price:,.2f})"
        )


def limits(wish: Hardware) -> str:
    """Return the limits of a run's time and price in words; empty if there are none."""
    words = [
        f"hardware.{name} {value:g}"
        for name in ("max_hours", "max_price")
        if (value := getattr(wish, name)) is not None
    ]
    return " and ".join(words)


def layouts(recipe: Recipe, geometry: Geometry) -> list[Recipe]:
    """Return the recipe with each sharding that the plan may choose: itself, if it names one.

    Raises:
        RecipeError: none of them can work on any machine.
    """
    if not recipe.sharding.is_auto:
        return _with_replicas(recipe, recipe.sharding)
    named = next(name for name, sharding in SHARDINGS.items() if sharding.is_plain)
    plain = recipe.model_copy(update={"sharding": Sharding.model_validate({"name": named})})
    if geometry.unsupported:
        # The closed form, which compares shardings, does not hold for this model.
        return [plain]
    checkpointing = recipe.training.activation_checkpointing
    able = [
        way
        for layout in ranking.layouts(recipe, geometry)
        for way in _with_replicas(layout, recipe.sharding)
        if layout.training.activation_checkpointing == checkpointing
    ]
    if not able:
        raise RecipeError.of(f"recipe {recipe.name}", candidates.impossible(plain, geometry))
    return able


def _with_replicas(recipe: Recipe, wish: Sharding) -> list[Recipe]:
    """Return a recipe with each number of replicas that the plan may choose."""
    if wish.replicas != "auto":
        return [recipe]
    counts = (1, "nodes") if SHARDINGS[recipe.sharding.name].replicates else (1,)
    shardings = [recipe.sharding.model_copy(update={"replicas": count}) for count in counts]
    return [recipe.model_copy(update={"sharding": sharding}) for sharding in shardings]


def divided(recipe: Recipe, shape: Shape, geometry: Geometry) -> Iterator[Recipe]:
    """Yield a recipe with each sharding.sequence_parallel that it can have on a shape, the smallest first;
    none where it names one, or the plan chooses the sharding."""
    sharding = recipe.sharding
    if sharding.is_auto or sharding.sequence_parallel > 1:
        return
    for parts in range(2, shape.processes + 1):
        way = recipe.model_copy(update={"sharding": sharding.model_copy(update={"sequence_parallel": parts})})
        if not candidates.impossible(way, geometry):
            yield way


def replica_note(fit: Fit, geometry: Geometry) -> list[str]:
    """Return the plan's line on the other way of sharding over several nodes: in each node alone, or over
    all of them."""
    shape, sharding = fit.shape, fit.recipe.sharding
    if shape.nodes == 1 or fit.time is None or not fit.sharding.replicates:
        return []
    count: Any = "nodes" if sharding.replicas == 1 else 1
    changed = fit.recipe.model_copy(update={"sharding": sharding.model_copy(update={"replicas": count})})
    other = candidates.best_fit(changed, shape, geometry)
    change = f"sharding.replicas: {count} instead of {sharding.replicas}"
    if isinstance(other, str):
        # The arithmetic follows in further lines.
        return [f"{change} does not fit: {other.splitlines()[0]}"]
    if other.time is None:
        return []
    sizes = [way.needs[0].peak_bytes / 2**30 for way in (other, fit)]
    return [
        f"{change} would take {other.time.seconds:.3g} s a step instead of {fit.time.seconds:.3g}, and "
        f"{sizes[0]:.1f} GiB of a GPU instead of {sizes[1]:.1f}"
    ]


def best_layout(ways: Sequence[Recipe], shape: Shape, geometry: Geometry) -> Fit | str:
    """Return the best of several shardings on a shape: none on one process, else the fastest that fits; or
    what is missing."""
    tried = [(way, candidates.best_fit(way, shape, geometry)) for way in ways]
    fits = [fit for _, fit in tried if isinstance(fit, Fit)]
    if len(ways) == 1:
        return tried[0][1]
    if not fits:
        return _least_missing(ways, shape, geometry)
    plain = next((fit for fit in fits if fit.sharding.is_plain), None)
    # Shardings are listed in the order of how much they shard; the first of equals is taken.
    best = plain or min(fits, key=lambda fit: (fit.is_tight, -fit.tokens_per_second))
    return replace(best, sharding_reason=_why_sharding(best, len(fits)))


def _least_missing(ways: Sequence[Recipe], shape: Shape, geometry: Geometry) -> str:
    """Return what the sharding that comes nearest to fitting lacks on a shape."""
    tried = [candidates.each(way, shape, geometry) for way in ways]
    smallest = [fits[-1] for fits in tried if not isinstance(fits, str)]
    if not smallest:
        # A sharding for another number of processes says nothing about the recipe.
        part = candidates.training_part(ways[0], shape)
        able = [lack for way, lack in zip(ways, tried, strict=True) if not sharding_of(way).misfit(part)]
        return str((able or tried)[0])
    nearest = min(smallest, key=lambda fit: fit.share)
    return f"with sharding {_named(nearest.recipe.sharding)}, {candidates.lacks(nearest)}"


def _named(sharding: Sharding) -> str:
    offload = "" if sharding.offload == "none" else f", offload {sharding.offload}"
    replicas = "" if sharding.replicas == 1 else f", replicas {sharding.replicas}"
    return f"{sharding.name}{offload}{replicas}"


def _why_sharding(fit: Fit, ways: int) -> str:
    beginning = f"sharding {_named(fit.recipe.sharding)}, which the recipe leaves to the plan: "
    if fit.sharding.is_plain:
        return beginning + "one process has nothing to share"
    if ways == 1:
        return beginning + f"the only one that fits on {fit.shape.name}"
    if fit.time is None:
        return (
            beginning
            + f"of {counted(ways, 'way')} that fit, whose speed is not known, the one that shards least"
        )
    return beginning + f"of {counted(ways, 'way')} that fit, the fastest by its estimate"


def cost(fit: Fit, steps: int | None) -> tuple[Any, ...]:
    """Return what orders shapes under `hardware.shape: auto`, the cheapest run first.

    Runs within max_hours and max_price precede all others, of which the nearest is first. Those whose time is
    not known follow those whose time is, and tight ones those that are not. The price of a run is that of its
    tokens, of which all shapes train as many; where no time is known, that of an hour.
    """
    is_timed, price_per_hour = fit.time is not None, fit.shape.total_price_per_hour
    excess = Timed.of(fit, steps).excess(fit.recipe.hardware) if is_timed and steps else 0.0
    price = fit.price_per_token if is_timed else price_per_hour
    return (
        max(1.0, excess),
        not is_timed,
        fit.is_tight,
        price,
        -fit.tokens_per_second,
        price_per_hour,
        fit.share,
    )


def cheapest_first(
    recipe: Recipe, shapes: Sequence[Shape], geometry: Geometry, steps: int | None
) -> list[Shape]:
    """Return shapes in the order of `cost`, of one sample at a time, for models whose fits are only estimated
    roughly."""
    tried = [(shape, candidates.each(recipe, shape, geometry)) for shape in shapes]
    costs = {shape.name: cost(fits[-1], steps) for shape, fits in tried if not isinstance(fits, str)}
    return sorted(shapes, key=lambda shape: costs.get(shape.name, (math.inf,)))


def reason(fit: Fit, steps: int | None) -> str:
    """Return why a plan has its shape."""
    wish = fit.recipe.hardware
    if wish.shape != "auto":
        return "as the recipe says"
    if this_machine.is_row(fit.shape):
        return f"this machine ({this_machine.described(fit.shape)}), as the run is on no cluster"
    if fit.time is None:
        return "no speed of those that fit is known, and it costs least an hour"
    beginning, limit = "of those that fit, the cheapest run", limits(wish)
    if not limit:
        return beginning
    if not steps:
        return (
            f"{beginning}; the limits of hours and price could not be compared, as the number of samples is "
            "not known"
        )
    within = Timed.of(fit, steps).excess(wish) <= 1
    return (
        f"{beginning} within {limit}"
        if within
        else f"none of those that fit keeps {limit}, and it comes nearest"
    )
