"""Questions about one field of a recipe: the largest value that still fits, the fewest GPUs, the least price
or time.

All answers are exact at their edge: the next larger length, micro batch, rank or number of layers does not
fit, and no shape with fewer GPUs, a lower price or a shorter time satisfies the question.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from flytune.errors import DoesNotFit, RecipeError
from flytune.hardware import Shape, load_shapes
from flytune.planning import candidates, choosing, document, largest, planner, ranking
from flytune.planning.candidates import Fit
from flytune.planning.choosing import Timed, limits
from flytune.planning.largest import LAYERS, MICRO_BATCH, Solution
from flytune.recipe import Recipe
from flytune.records import Plan
from training_estimates.sizes import Geometry

GPUS, PRICE, HOURS = "gpus", "price", "hours"
FIELDS = (*largest.FIELDS, GPUS, PRICE, HOURS)
"""All that can be asked for; the last three are answered by all shapes and shardings."""


def named(field: str) -> str:
    """Return the field of FIELDS that a person has written, with or without its section.

    Raises:
        RecipeError: it is none of them.
    """
    short = {"micro_batch": MICRO_BATCH, "layers": LAYERS} | {
        name.rpartition(".")[2]: name for name in FIELDS
    }
    if (full_name := short.get(field, field)) in FIELDS:
        return full_name
    near = difflib.get_close_matches(field.rpartition(".")[2], short, n=1)
    raise RecipeError(
        f"--solve {field:.60}: "
        + (f"did you mean {short[near[0]]}? " if near else "")
        + f"it can be one of {', '.join(FIELDS)}"
    )


def solve(
    recipe: Recipe,
    field: str,
    geometry: Geometry,
    samples: int | None = None,
    shapes: Sequence[Shape] | None = None,
) -> Solution:
    """Return the answer about a field of FIELDS.

    Args:
        samples: number of training samples, from which hours and price follow; training.max_steps may say it
            too.

    Raises:
        RecipeError: the recipe cannot work, the question lacks a limit, or the closed form, which answers,
            does not hold for the model.
        DoesNotFit: not even the smallest value fits, or no shape keeps the limit.
    """
    shapes = load_shapes() if shapes is None else shapes
    if geometry.unsupported:
        raise RecipeError(
            f"recipe {recipe.name}: model.name_or_path: {recipe.model.name_or_path}: --solve asks the closed "
            f"form, which does not know {geometry.unsupported}; plan single recipes, about which the dry run "
            "decides"
        )
    if field in (GPUS, PRICE, HOURS):
        return _of_shapes(recipe, field, geometry, samples, shapes)
    ways = choosing.layouts(recipe, geometry)
    if problems := candidates.impossible(ways[0], geometry):
        raise RecipeError.of(f"recipe {recipe.name}", problems)
    answer = _largest(ways, field, geometry, candidates.wished(recipe, shapes))
    return answer._replace(divided=_divided(answer, geometry) if field == largest.MAX_LENGTH else "")


def _largest(ways: Sequence[Recipe], field: str, geometry: Geometry, shapes: Sequence[Shape]) -> Solution:
    """Return the largest value of a field that fits with any of several shardings, with the first of those
    that have it."""
    answers, refusals = [], []
    for way in ways:
        try:
            answers.append(largest.largest(way, field, geometry, shapes))
        except DoesNotFit as error:
            refusals.append(error)
    if not answers:
        raise refusals[0]
    return max(answers, key=lambda answer: answer.value)


def _divided(answer: Solution, geometry: Geometry) -> str:
    """Return from which length on processes that divide samples help, as a sentence; empty if none do."""
    shape, longest = answer.fit.shape, answer
    for way in choosing.divided(answer.fit.recipe, shape, geometry):
        with suppress(DoesNotFit):
            tried = largest.largest(way, largest.MAX_LENGTH, geometry, [shape])
            longest = max(longest, tried, key=lambda length: length.value)
    if longest is answer:
        return ""
    return (
        f"from {answer.value + 1:,.0f} tokens on, sharding.sequence_parallel helps: "
        f"{longest.fit.recipe.sharding.sequence_parallel} fits {longest.value:,.0f}"
    )


def _of_shapes(
    recipe: Recipe, field: str, geometry: Geometry, samples: int | None, shapes: Sequence[Shape]
) -> Solution:
    """Return the fewest GPUs, the least price within hardware.max_hours, or the least time within
    hardware.max_price."""
    wish = recipe.hardware
    if field == PRICE and wish.max_hours is None:
        raise RecipeError(
            "--solve price: the least price within which time? Set hardware.max_hours, or --max-hours"
        )
    if field == HOURS and wish.max_price is None:
        raise RecipeError(
            "--solve hours: the least time for which price? Set hardware.max_price, or --max-price"
        )
    anywhere = planner.on_shape(recipe, "auto")
    ways = list(_ways(anywhere, geometry, shapes))
    if not ways:
        planner.make(anywhere, shapes, geometry)
    if field == GPUS:
        fewest = min(
            ways,
            key=lambda fit: (
                fit.shape.world_size,
                fit.is_tight,
                fit.recipe.sharding != recipe.sharding,
                _price(fit),
            ),
        )
        return _answer(anywhere, field, fewest.shape.world_size, fewest, _fewer(anywhere, fewest, shapes))
    steps = planner.steps_of(recipe, samples)
    if not steps:
        raise RecipeError(
            f"--solve {field}: hours and price follow from the number of samples: say it (--samples)"
        )
    timed = [Timed.of(fit, steps) for fit in ways if fit.time is not None]
    if not timed:
        raise RecipeError(
            f"--solve {field}: the speed of none of the shapes that fit is known (accelerators.yaml)"
        )
    kept = [answer for answer in timed if answer.excess(wish) <= 1]
    rank: Callable[[Timed], tuple[float, ...]] = (
        (lambda answer: (answer.price, answer.hours, answer.fit.share))
        if field == PRICE
        else (lambda answer: (answer.hours, answer.price, answer.fit.share))
    )
    if not kept:
        nearest = min(
            timed,
            key=lambda answer: (
                (answer.most_hours, answer.price) if field == PRICE else (answer.most_price, answer.hours)
            ),
        )
        raise DoesNotFit(
            f"recipe {recipe.name}: no shape keeps {limits(recipe.hardware)}; the nearest is {nearest.said()}"
        )
    best = min(kept, key=rank)
    better = [answer for answer in timed if rank(answer)[0] < rank(best)[0]]
    beyond = (
        f"{max(better, key=rank).said()}, more than {limits(recipe.hardware)}"
        if better
        else "no way that fits has less"
    )
    return _answer(anywhere, field, rank(best)[0], best.fit, beyond)


def _answer(recipe: Recipe, field: str, value: float, fit: Fit, beyond: str) -> Solution:
    other = fit.recipe.model_copy(
        update={"hardware": fit.recipe.hardware.model_copy(update={"shape": fit.shape.name})}
    )
    return Solution(field, value, fit, None, None, beyond, ranking.changes(recipe, other))


def _ways(recipe: Recipe, geometry: Geometry, shapes: Sequence[Shape]) -> Iterator[Fit]:
    """List all ways that fit: sharding, offload, checkpointing, shape, micro batch."""
    for layout in ranking.layouts(recipe, geometry):
        for shape in candidates.wished(layout, shapes):
            tried = candidates.each(layout, shape, geometry)
            yield from (fit for fit in tried if fit.fits) if not isinstance(tried, str) else ()


def _fewer(recipe: Recipe, fewest: Fit, shapes: Iterable[Shape]) -> str:
    fewer = {
        shape.world_size
        for shape in candidates.wished(recipe, list(shapes))
        if shape.world_size < fewest.shape.world_size
    }
    if not fewer:
        return "no shape has fewer"
    return f"no shape with {max(fewer)} or fewer fits, with any sharding"


def _price(fit: Fit) -> float:
    return fit.price_per_token if fit.time else fit.shape.total_price_per_hour


def described(answer: Solution) -> list[str]:
    """Return an answer as sentences."""
    field, fit = answer.field, answer.fit
    how = f"on {fit.shape.name} with micro batch {fit.workload.micro_batch} x {fit.workload.accumulation}"
    if field == PRICE:
        first = f"least price: ${answer.value:,.2f} {how}"
    elif field == HOURS:
        first = f"least time: {answer.value:.3g} hours {how}"
    elif field == GPUS:
        first = f"fewest GPUs: {answer.value:,} {how}"
    else:
        first = f"largest {field} that fits: {answer.value:,} {how}"
    lines = [first + (f"; write {answer.changes}" if answer.changes else "")]
    if answer.next_value is not None:
        lines.append(f"{answer.next_value:,} does not fit: {answer.beyond}")
    else:
        lines.append(answer.beyond)
    if answer.divided:
        lines.append(answer.divided)
    if fit.is_tight:
        free = "no smaller value leaves" if field in largest.FIELDS else ""
        if answer.well is not None:
            free = f"{answer.well:,} leaves"
        lines.append(
            f"tight: {fit.share:.0%} of a resource is needed"
            + (f"; {free} a tenth of each free" if free else "")
        )
    return lines


def as_json(answer: Solution, plan: Plan) -> str:
    """Return an answer as JSON: the value, its edge, the fields to write, and the plan with it."""
    content = {
        "version": 1,
        "solve": answer.field,
        "value": answer.value,
        "next_value": answer.next_value,
        "beyond": answer.beyond,
        "well": answer.well,
        "changes": answer.changes,
        "divided": answer.divided,
        "plan": document.of(plan),
    }
    return json.dumps(content, indent=2)
