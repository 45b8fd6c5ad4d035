"""The points of a sweep: variants of one recipe."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from flytune import limits
from flytune.errors import RecipeError
from flytune.recipe import Checkpoints, Recipe, fields
from flytune.schema import Strict

NAME_LENGTH = 63
"""Maximum length of a recipe's name."""
MISTAKES = 100
"""Number of mistakes that one error lists."""
"""Maximum characters of a dotted field."""


class Point(Strict):
    """Point of a sweep: one recipe."""

    recipe: Recipe
    changes: dict[str, Any]
    """Values that replace those of the sweep's recipe, by dotted field."""
    refused: str = ""
    """Reason why it cannot run; empty if it can."""

    @property
    def values(self) -> str:
        """Return its changes in words: `training.learning_rate 0.001, method.r 8`."""
        return ", ".join(f"{field} {shown(value)}" for field, value in self.changes.items())


class Points(Strict):
    """All points of a sweep."""

    recipe: str
    """Name of the sweep's recipe."""
    fields: list[str]
    """Dotted fields that vary, in the caller's order."""
    points: list[Point] = Field(default=[])

    @property
    def runnable(self) -> list[Recipe]:
        """Return the recipes of the points that are not refused."""
        return [point.recipe for point in self.points if not point.refused]


def draw(
    recipe: Recipe, grid: Mapping[str, Any], changes: Sequence[Mapping[str, Any]], max_points: int
) -> Points:
    """Return a point for each combination of the grid's values, the last field changing fastest, or for each
    of `changes`.

    Args:
        recipe: the sweep's recipe.
        grid: dotted field -> list of values.
        changes: for each point, dotted field -> value.
        max_points: limit of points, as each is a complete fine-tune.

    Raises:
        RecipeError: all mistakes of all points at once: unknown fields, bad values, duplicate names or
            points.
    """
    where = f"sweep of {recipe.name}"
    combinations = _combinations(where, grid, changes, max_points)
    points, problems = dict[int, Point](), dict[str, list[int]]()
    for number, change in enumerate(combinations, 1):
        suffix = f"-{number:0{len(str(len(combinations)))}}"
        try:
            points[number] = Point(recipe=changed(recipe, change, suffix), changes=change)
        except RecipeError as error:
            for line in str(error).splitlines()[1:]:
                problems.setdefault(line.strip(), []).append(number)
    on_hub = [at for at, point in points.items() if str(point.recipe.publish.address).startswith("hf://")]
    if on_hub:
        problems[
            "publish.address: each point would replace main on the hub; leave it out, and finetune best.yaml "
            "with it"
        ] = on_hub
    without_heldout = [at for at, point in points.items() if not point.recipe.data.holds_out]
    if without_heldout:
        problems[
            "data.heldout_fraction: 0, but points are compared on held-out samples; write a share, such as "
            "0.02"
        ] = without_heldout
    sentences = [line + _at(numbers, len(combinations)) for line, numbers in problems.items()]
    if sentences := [*sentences, *_duplicates(points)]:
        raise RecipeError.of(where, sentences)
    return Points(
        recipe=recipe.name,
        fields=list(dict.fromkeys(itertools.chain(*combinations))),
        points=list(points.values()),
    )


def changed(recipe: Recipe, changes: Mapping[str, Any], suffix: str) -> Recipe:
    """Return the recipe with `changes`, and `suffix` on its name and that of its checkpoints, so that points
    share no state.

    Raises:
        RecipeError: as for a recipe file with those fields.
    """
    content = recipe.model_dump(exclude_defaults=True)
    for field in sorted(changes, key=lambda field: field.count(".")):
        fields.put(content, field, changes[field])
    if "name" not in changes:
        content["name"] = _with_suffix(recipe.name, suffix)
    has_checkpoints = isinstance(content.get("checkpoints"), dict)
    if recipe.checkpoints.name and has_checkpoints and "checkpoints.name" not in changes:
        content["checkpoints"]["name"] = _with_suffix(recipe.checkpoints.name, suffix)
    return Recipe.model_validate(content)


def value_at(recipe: Recipe, field: str) -> Any:
    """Return the value of a dotted field; a method or sharding with only a name is that name."""
    if field in ("method", "sharding"):
        section = getattr(recipe, field).model_dump(exclude_defaults=True)
        return section["name"] if len(section) == 1 else section
    value: Any = recipe.model_dump()
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def shown(value: Any) -> str:
    """Return a value as it is written in a recipe."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _combinations(
    where: str, grid: Mapping[str, Any], changes: Sequence[Mapping[str, Any]], max_points: int
) -> list[dict[str, Any]]:
    if bool(grid) == bool(changes):
        both = "both are given" if grid else "none is given"
        raise RecipeError(
            f"{where}: give a grid ({{training.learning_rate: [1e-4, 2e-4]}}) or a list of changes "
            f"([{{training.learning_rate: 1e-4}}]); {both}"
        )
    if grid and not isinstance(grid, Mapping):
        raise RecipeError(f"{where}: a grid is a mapping of fields to lists of values; found {grid!r:.60}")
    if changes and not isinstance(changes, list | tuple):
        raise RecipeError(
            f"{where}: changes are a list of mappings of fields to values; found {changes!r:.60}"
        )
    if problems := [*_bad_axes(grid), *_bad_changes(changes)]:
        raise RecipeError.of(where, problems[:MISTAKES])
    count = math.prod(map(len, grid.values())) if grid else len(changes)
    if count > min(max_points, limits.LISTED):
        more = f", or max_points: {count}" if count <= limits.LISTED else f"; {limits.LISTED:,} are the most"
        points = count if count < limits.ROWS else f"more than {limits.ROWS:,}"
        raise RecipeError(f"{where}: {points} points, each a complete fine-tune; give fewer values{more}")
    if changes:
        return [dict(change) for change in changes]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _bad_axes(grid: Mapping[str, Any]) -> Iterator[str]:
    for field, values in grid.items():
        if wrong := fields.problem(field):
            yield wrong
        elif not isinstance(values, list) or not values:
            yield f"{field}: a grid has a list of values for each field; found {values!r:.60}"
        elif twice := _repeated(values):
            more = f" and {len(twice) - 10} more" if len(twice) > 10 else ""
            yield f"{field}: {', '.join(shown(value)[:60] for value in twice[:10])}{more}: duplicate values"


def _repeated(values: Sequence[Any]) -> list[Any]:
    """Return the values that equal an earlier one, in time that grows with their number only."""
    seen, twice = set[Any](), []
    for value in values:
        key = repr(value) if isinstance(value, list | dict) else value
        if key in seen:
            twice.append(value)
        seen.add(key)
    return twice


def _bad_changes(changes: Sequence[Any]) -> Iterator[str]:
    for number, change in enumerate(changes, 1):
        if not isinstance(change, Mapping) or not change:
            yield f"changes[{number - 1}]: fields and their values; found {change!r:.60}"
        else:
            yield from (f"changes[{number - 1}]: {wrong}" for wrong in map(fields.problem, change) if wrong)


def _duplicates(points: Mapping[int, Point]) -> Iterator[str]:
    names, contents = dict[str, list[int]](), dict[str, list[int]]()
    checkpoints = dict[tuple[str | None, str], list[int]]()
    for number, point in points.items():
        names.setdefault(point.recipe.name, []).append(number)
        if point.recipe.checkpoints.name:
            place = point.recipe.checkpoints.folder, point.recipe.checkpoints.name
            checkpoints.setdefault(place, []).append(number)
        content = point.recipe.model_copy(update={"name": "", "checkpoints": Checkpoints()}).key()
        contents.setdefault(content, []).append(number)
    yield from (
        f"points {_numbers(twice)} have the name {name}" for name, twice in names.items() if len(twice) > 1
    )
    yield from (
        f"points {_numbers(twice)} have the checkpoints.name {name}, so that one would resume from the state "
        "of another; leave it out"
        for (_, name), twice in checkpoints.items()
        if len(twice) > 1
    )
    yield from (
        f"points {_numbers(twice)} have the same recipe" for twice in contents.values() if len(twice) > 1
    )


def _at(numbers: Sequence[int], count: int) -> str:
    """Return the points that have a mistake, if not all have it."""
    if len(numbers) == count:
        return ""
    return f" (point{'s' * (len(numbers) > 1)} {_numbers(numbers)})"


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _with_suffix(name: str, suffix: str) -> str:
    return name[: NAME_LENGTH - len(suffix)].rstrip("-") + suffix
