"""The largest value of a field with which a recipe fits: exact at its edge, the next one does not fit."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flytune import limits
from flytune.errors import DoesNotFit, RecipeError
from flytune.hardware import Shape
from flytune.planning import candidates
from flytune.planning.base_sizes import layer_counter
from flytune.planning.candidates import Fit
from flytune.recipe import Recipe
from flytune.records.plan import TIGHT
from flytune.sharding import sharding_of
from training_estimates.config_json import MOST_LAYERS
from training_estimates.sizes import Geometry

MAX_LENGTH, MICRO_BATCH, RANK = "data.max_length", "training.per_device_train_batch_size", "method.r"
LAYERS = "num_hidden_layers"
FIELDS = (MAX_LENGTH, MICRO_BATCH, RANK, LAYERS)
"""Fields whose largest value can be asked for."""

LEAST_LENGTH = 128
"""Tokens below which no length is recommended."""


class Solution(NamedTuple):
    """The answer to a question, with the way to run it."""

    field: str
    value: float
    fit: Fit
    well: int | None
    """Largest value that leaves a tenth of each resource free, on the same shape; None if there is none, or
    it is the value."""
    next_value: float | None
    """The value after it; None where there is none."""
    beyond: str
    """Reason why it is not the answer."""
    changes: str
    """Fields that the recipe must have for it, beside the one that was asked for; empty if there are none."""
    divided: str = ""
    """Sentence on the length from which sharding.sequence_parallel fits longer samples; empty if it does
    not."""


class _Values(NamedTuple):
    """A field whose values need more memory the larger they are."""

    numbers: Sequence[int]
    """Values in question, ascending."""
    end: str
    """Sentence about the end of them."""
    changed: Callable[[int], tuple[Recipe, Geometry]]
    fits: Callable[[int, Shape, float], Fit | str]
    """Returns the best way to run a value on a shape with this share of each resource at most, or why there
    is none."""


def largest(
    recipe: Recipe, field: str, geometry: Geometry, shapes: Sequence[Shape], share: float = 1.0
) -> Solution:
    """Return the largest value of a field with which a recipe fits on one of some shapes; of several shapes
    the cheapest.

    Args:
        share: share of each resource that may be needed.

    Raises:
        RecipeError: no model or method of the recipe's kind has the field.
        DoesNotFit: not even the smallest value fits; what it lacks on each shape.
    """
    by_shape = {shape.name: _values(recipe, field, geometry, shape) for shape in shapes}
    value = 0
    # One that takes most first: of the others, only whether they take the next value is then asked.
    for shape in sorted(shapes, key=lambda shape: -shape.gpu_memory_gib * shape.world_size):
        values = by_shape[shape.name]
        start = next((at for at, number in enumerate(values.numbers) if number > value), None)
        if start is not None and isinstance(values.fits(values.numbers[start], shape, share), Fit):
            value = values.numbers[_last(values, shape, start, share)]
    if not value:
        lines = [_none(by_shape[shape.name], field, shape) for shape in shapes]
        raise DoesNotFit(
            f"recipe {recipe.name}: no {field} fits\n" + "\n".join(f"  {line}" for line in lines)
        )
    shape, values = next(
        (shape, values)
        for shape in shapes
        if value in (values := by_shape[shape.name]).numbers
        and isinstance(values.fits(value, shape, share), Fit)
    )
    at = values.numbers.index(value)
    # As a plan of the recipe with that value has it.
    fit = (
        values.fits(value, shape, share)
        if field == MICRO_BATCH
        else candidates.best_fit(*_swapped(values, value, shape))
    )
    assert isinstance(fit, Fit)
    well = None
    if fit.share > TIGHT and isinstance(values.fits(values.numbers[0], shape, TIGHT), Fit):
        well = values.numbers[_last(values, shape, 0, TIGHT)]
    following = values.numbers[at + 1] if at + 1 < len(values.numbers) else None
    beyond = values.end if following is None else str(values.fits(following, shape, share))
    return Solution(field, value, fit, well, following, beyond, "")


def _swapped(values: _Values, value: int, shape: Shape) -> tuple[Recipe, Shape, Geometry]:
    recipe, geometry = values.changed(value)
    return recipe, shape, geometry


def _none(values: _Values, field: str, shape: Shape) -> str:
    """Return why a shape has not even the first value."""
    if not values.numbers:
        return f"{shape.name}: {values.end}"
    return f"{shape.name}: {field} {values.numbers[0]}: {values.fits(values.numbers[0], shape, 1.0)}"


def _last(values: _Values, shape: Shape, first: int, share: float) -> int:
    """Return the place of the last value that fits, of which the one at `first` does: the one after it does
    not."""
    low, step = first, 1
    end = len(values.numbers)
    while low + step < end and isinstance(values.fits(values.numbers[low + step], shape, share), Fit):
        low, step = low + step, 2 * step
    high = min(low + step, end)
    while high - low > 1:
        middle = (low + high) // 2
        if isinstance(values.fits(values.numbers[middle], shape, share), Fit):
            low = middle
        else:
            high = middle
    return low


def _values(recipe: Recipe, field: str, geometry: Geometry, shape: Shape) -> _Values:
    """Return the values of a field on a shape."""
    numbers: Sequence[int]
    if field == MAX_LENGTH:
        numbers, end = range(1, limits.TOKENS + 1), "the largest length that a recipe may have"
        if geometry.bounds_positions and geometry.positions:
            numbers, end = range(1, geometry.positions + 1), "the base has no further positions"

        def changed(value: int) -> tuple[Recipe, Geometry]:
            return _with(recipe, "data", {"max_length": value}), geometry

    elif field == RANK:
        if recipe.method.name == "full":
            raise RecipeError(
                "--solve method.r: method full has no adapter, and so no rank; ask for it with lora or qlora"
            )
        widest = max(
            (max(linear.rows, linear.columns) for linear in geometry.linears if linear.adaptable), default=1
        )
        numbers, end = range(1, widest + 1), f"an adapter of rank {widest:,} is as wide as the widest layer"

        def changed(value: int) -> tuple[Recipe, Geometry]:
            return _with(recipe, "method", {"r": value}), geometry

    elif field == LAYERS:
        count = layer_counter(recipe.model)
        numbers, end = range(1, MOST_LAYERS + 1), "no model has more"

        def changed(value: int) -> tuple[Recipe, Geometry]:
            return recipe, count(value)

    else:
        degrees = sharding_of(recipe).degrees(candidates.training_part(recipe, shape))
        batch = recipe.training.global_batch_size
        samples = degrees.samples(batch)
        numbers = (
            [] if degrees.near(batch) else [size for size in range(1, samples + 1) if samples % size == 0]
        )
        last = f"it is the share of a process in training.global_batch_size {batch}"
        end = str(candidates.best_fit(recipe, shape, geometry)) if not numbers else last

        def changed(value: int) -> tuple[Recipe, Geometry]:
            return _with(recipe, "training", {"per_device_train_batch_size": value}), geometry

    def fits(value: int, shape: Shape, share: float) -> Fit | str:
        other, sizes = changed(value)
        # Of the other fields no value is impossible by itself.
        if field == RANK and (problems := candidates.impossible(other, sizes)):
            return problems[0]
        tried = candidates.each(other, shape, sizes)
        if isinstance(tried, str):
            return tried
        if field == MICRO_BATCH:
            tried = [fit for fit in tried if fit.workload.micro_batch == value]
            if not tried:
                return f"{other.sharding.name} does not take it with this accumulation"
        held = [fit for fit in tried if fit.fits and fit.share <= share]
        if held:
            return held[0]
        return "tight" if tried[-1].fits else candidates.lacks(tried[-1])

    return _Values(numbers, end, changed, fits)


def _with(recipe: Recipe, section: str, fields: dict[str, Any]) -> Recipe:
    """Return a recipe with other valid values of a section: without validation, which would take most of the
    time."""
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=fields)})


def shorter(recipe: Recipe, geometry: Geometry, shapes: Sequence[Shape], share: float) -> str:
    """Return the largest length with which a recipe fits that changes in nothing else, as words; empty if it
    is of no use."""
    try:
        answer = largest(recipe, MAX_LENGTH, geometry, shapes, share)
    except DoesNotFit:
        return ""
    if not LEAST_LENGTH <= answer.value < recipe.data.max_length:
        return ""
    return (
        f"{MAX_LENGTH}: {answer.value} (on {answer.fit.shape.name}, "
        f"${answer.fit.shape.total_price_per_hour:.2f} an hour)"
    )
