"""All ways to run a recipe's method on all shapes, by price or time, and the smallest change that makes a
recipe fit."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, Literal, NamedTuple

from flytune.hardware import Shape
from flytune.planning import candidates
from flytune.planning.candidates import Fit
from flytune.recipe import OPTIMIZERS, Recipe
from flytune.sharding import SHARDINGS
from training_estimates.sizes import Geometry

# Sizes of changes: what each means to the user, from small to large. Those of one candidate are added.
_CHECKPOINTING = 0.05
_SHARDING = 1.0
"""Size of another name, and of another offload: the result is the same."""
_BATCH = 1.5
"""Size of a batch that the processes can divide, and up to _FARTHEST more, as far as it is from the
recipe's."""
_FARTHEST = 1.0
_OTHER_CPUS = 1.5
_AUTO = 2.0
"""Size of the default optimizer, where the recipe names another of its algorithm."""
_LESS_PRECISE_STATES = 2.1
_PAGED = 0.1
"""Size of paged states, beside their precision."""
_ANY_SHAPE = 3.0
_ANY_KIND_OF_SHAPE = 3.2
_NO_FLOAT32_WEIGHTS = 3.5
_TO_GPUS = 3.9
"""Size of the move from CPUs to GPUs: with the two changes of a sharding, a move among CPUs is still
smaller."""
_HALF_LENGTH = 4.0
_OTHER_ALGORITHM = 5.0
_METHOD = 8.0
A_SHAPE = 2
"""Number of ways that a ranking keeps of each shape."""
By = Literal["price", "time"]
WOULD_FIT = "it would fit with "
"""Beginning of the sentence about the smallest change."""


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
    """Rank all feasible pairs of sharding and offload, with and without checkpointing, and all micro batches,
    on all shapes that the recipe's wishes allow, by the price or the time of a token.

    Tight fits follow all others. Shapes whose GPU has no row in accelerators.yaml have no time, and come
    last.
    """
    started, looked_at, best = time.monotonic(), 0, []
    for changed, shape in product(layouts(recipe, geometry), candidates.wished(recipe, shapes)):
        fits = candidates.each(changed, shape, geometry)
        if isinstance(fits, str):
            looked_at += 1
            continue
        looked_at += len(fits)
        if held := [fit for fit in fits if fit.fits]:
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


def layouts(recipe: Recipe, geometry: Geometry) -> Iterator[Recipe]:
    """List the recipe with each sharding, offload and checkpointing that can work, its own first."""
    asked = (recipe.sharding.name, recipe.sharding.offload, recipe.training.activation_checkpointing)
    ways = [
        (name, offload, checkpointing)
        for name, sharding in SHARDINGS.items()
        for offload in sharding.offloads
        for checkpointing in (True, False)
    ]
    for name, offload, checkpointing in sorted(ways, key=lambda way: way != asked):
        changed = _changed(
            recipe,
            {
                "sharding": _sharding(recipe, name, offload),
                "training": {"activation_checkpointing": checkpointing},
            },
        )
        if not candidates.impossible(changed, geometry):
            yield changed
    if recipe.sharding.replicas not in (1, "auto"):
        yield _changed(recipe, {"sharding": {**_sharding(recipe, *asked[:2]), "replicas": 1}})


def _sharding(recipe: Recipe, name: str, offload: str) -> Mapping[str, Any]:
    """Return a sharding that divides samples as the recipe's does, if it can; the recipe's own with its
    options."""
    asked = recipe.sharding
    if (name, offload) == (asked.name, asked.offload):
        return asked.model_dump()
    parts = asked.sequence_parallel if SHARDINGS[name].divides_sequences else 1
    return {"name": name, "offload": offload, "sequence_parallel": parts}


def changes(recipe: Recipe, other: Recipe) -> str:
    """Return the fields in which another recipe differs, as they are written into a recipe; empty if none
    does."""
    fields = []
    if recipe.method.name != other.method.name:
        fields.append(f"method: {other.method.name}")
    if recipe.sharding != other.sharding and not recipe.sharding.is_auto:
        name, offload = other.sharding.name, other.sharding.offload
        parts = other.sharding.sequence_parallel
        options = f", offload: {offload}" * (offload != "none")
        options += f", sequence_parallel: {parts}" * (parts > 1)
        fields.append(f"sharding: {{name: {name}{options}}}" if options else f"sharding: {name}")
    if recipe.training.activation_checkpointing != other.training.activation_checkpointing:
        fields.append(
            f"training.activation_checkpointing: {str(other.training.activation_checkpointing).lower()}"
        )
    fields += [
        f"training.{name}: {value}"
        for name in ("optim", "master_dtype", "global_batch_size")
        if (value := getattr(other.training, name)) != getattr(recipe.training, name)
    ]
    if recipe.data.max_length != other.data.max_length:
        fields.append(f"data.max_length: {other.data.max_length}")
    if recipe.hardware != other.hardware:
        fields.append(f"hardware.shape: {other.hardware.shape}")
    return ", ".join(fields)


def change_that_fits(recipe: Recipe, shapes: Sequence[Shape], geometry: Geometry, share: float = 1.0) -> str:
    """Return the smallest change with which the recipe fits, and needs at most `share` of each resource, as a
    sentence.

    Among changes of one size (the table above) the cheapest.
    """
    # What fits already needs no other method to fit better.
    able = (
        change for change in _changes(recipe, shapes) if share == 1 or change.method == recipe.method.name
    )
    tried = sorted(able, key=lambda change: change.size)
    # Most of a search that finds nothing is spared by trying first what takes the least memory with each
    # method.
    hopeful: set[str] = set()
    for change in tried:
        if change.is_extreme and change.method not in hopeful:
            fits = _fits(recipe, change, shapes, geometry, share)
            hopeful |= {change.method for _ in islice(fits, 1)}
    fitting: list[tuple[float, float, str]] = []
    for change in tried:
        if fitting and change.size >= min(fitting)[0]:
            break
        if change.method in hopeful:
            fitting += _fits(recipe, change, shapes, geometry, share)
    if fitting:
        return f"{WOULD_FIT}{min(fitting)[2]}"
    return (
        "no change of method, optimizer, sharding, length or shape makes it fit; add a larger shape to "
        "shapes.yaml"
    )


class _Change(NamedTuple):
    """A change of a recipe, apart from its sharding."""

    size: float
    method: str
    fields: dict[str, dict[str, Any]]
    """Values of the changed fields, by section."""
    is_extreme: bool
    """True if no other change of this method needs less memory, apart from those that are extreme as well."""


def _fits(
    recipe: Recipe, change: _Change, shapes: Sequence[Shape], geometry: Geometry, share: float
) -> Iterator[tuple[float, float, str]]:
    """List the ways in which a changed recipe fits: the size of the change with its sharding, the price, and
    its sentence."""
    for layout in layouts(_changed(recipe, change.fields), geometry):
        more = 0.0
        if not recipe.sharding.is_auto:
            more += _SHARDING * (layout.sharding.name != recipe.sharding.name)
            more += _SHARDING * (layout.sharding.offload != recipe.sharding.offload)
        if layout.training.activation_checkpointing != recipe.training.activation_checkpointing:
            more += _CHECKPOINTING
        for shape in candidates.wished(layout, shapes):
            fit = candidates.best_fit(layout, shape, geometry)
            if isinstance(fit, Fit) and fit.share <= share:
                price, moves = shape.total_price_per_hour, "hardware" in change.fields
                # Named: `auto` takes no row of CPUs.
                named = _changed(layout, {"hardware": {"shape": shape.name}}) if moves else layout
                where = "" if moves else f"on {shape.name}, "
                free = f", {1 - fit.share:.0%} to spare" if share < 1 else ""
                sentence = (
                    f"{changes(recipe, named) or 'the recipe as it is'} ({where}${price:.2f} an hour{free})"
                )
                yield change.size + more, price, sentence


def _changes(recipe: Recipe, shapes: Sequence[Shape]) -> Iterator[_Change]:
    """List changes of a recipe with their sizes."""
    halves = [recipe.data.max_length >> times for times in range(4) if recipe.data.max_length >> times >= 128]
    lengths, machines = halves or [recipe.data.max_length], _machines(recipe, shapes)
    asks_for_cpu = len(machines) > 1 and max(machines.values()) == _TO_GPUS
    for (steps, method), (cuts, length) in product(enumerate(_methods(recipe)), enumerate(lengths)):
        for (machine, move), (size, training) in product(machines.items(), _optimizers(recipe, method)):
            # Shorter samples need no other optimizer, but the one that all shardings have.
            is_other = size not in (0.0, _AUTO)
            if is_other and (cuts or steps):
                continue
            change: dict[str, dict[str, Any]] = {"method": {"name": method}} if steps else {}
            change |= {"data": {"max_length": length}} if cuts else {}
            change |= {"training": training} if training else {}
            change |= {"hardware": dict(machine)} if machine else {}
            is_widest = asks_for_cpu or move == max(machines.values())
            yield _Change(
                _METHOD * steps + _HALF_LENGTH * cuts + move + size,
                method,
                change,
                is_widest and (is_other or cuts == len(lengths) - 1),
            )
    for batch in _batches(recipe, shapes):
        far = abs(batch - recipe.training.global_batch_size) / recipe.training.global_batch_size
        yield _Change(
            _BATCH + min(_FARTHEST, far), recipe.method.name, {"training": {"global_batch_size": batch}}, True
        )


def _optimizers(recipe: Recipe, method: str) -> Iterator[tuple[float, dict[str, Any]]]:
    """List changes of the optimizer's states and of the weights that it changes, with their sizes."""
    training = recipe.training
    kind = OPTIMIZERS.get(training.optim, OPTIMIZERS["adamw_torch_fused"])
    # An adapter has no other copies of its weights.
    masters = {"master_dtype": "float32"} if method != "full" and training.master_dtype != "float32" else {}
    optims: dict[str, float] = {training.optim: 0.0}
    if training.optim != "auto":
        optims["auto"] = _AUTO if kind.algorithm == "adamw" else _OTHER_ALGORITHM
    for name, other in OPTIMIZERS.items():
        if (
            other.algorithm == kind.algorithm
            and other.library == "bitsandbytes"
            and name not in ("adamw_bnb_8bit", training.optim)
        ):
            optims[name] = _LESS_PRECISE_STATES + _PAGED * other.paged
    for name, size in optims.items():
        change = masters | ({"optim": name} if size else {})
        yield size, change
        if method == "full" and training.master_dtype == "float32":
            yield size + _NO_FLOAT32_WEIGHTS, change | {"master_dtype": "bfloat16"}


def _batches(recipe: Recipe, shapes: Sequence[Shape]) -> Iterator[int]:
    """List the global batches next to the recipe's that the processes of any sharding share on the shape that
    it names."""
    named = [
        candidates.training_part(recipe, shape) for shape in shapes if shape.name == recipe.hardware.shape
    ]
    for degrees in {sharding(recipe).degrees(shape) for sharding in SHARDINGS.values() for shape in named}:
        yield from degrees.near(recipe.training.global_batch_size)


def _machines(recipe: Recipe, shapes: Sequence[Shape]) -> dict[tuple[tuple[str, Any], ...], float]:
    """Return the changes of `hardware` to try, with their sizes."""
    anywhere: dict[str, Any] = {"shape": "auto", "max_price_per_hour": None}
    everywhere = tuple(anywhere.items())
    of_any_kind = (*everywhere, ("accelerator", None), ("spot", None))
    asked = {shape.name: shape.accelerator for shape in shapes}.get(
        recipe.hardware.shape, recipe.hardware.accelerator
    )
    if asked != "cpu":
        others = (
            {of_any_kind: _ANY_KIND_OF_SHAPE}
            if recipe.hardware.accelerator or recipe.hardware.spot is not None
            else {}
        )
        return {(): 0.0, everywhere: _ANY_SHAPE} | others
    return {(): 0.0, (*everywhere, ("accelerator", "cpu")): _OTHER_CPUS, everywhere: _TO_GPUS}


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
