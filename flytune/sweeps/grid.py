"""From one recipe to many: the points of a sweep, each a recipe of its own."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from flytune.errors import RecipeError
from flytune.recipe.recipe import Recipe
from flytune.recipe.sections import Checkpoints
from flytune.schema import Strict

NAME_LENGTH = 63
"""Of a recipe, at most."""


class Point(Strict):
    """One recipe of a sweep."""

    recipe: Recipe
    changes: dict[str, Any]
    """Dotted fields, and what stands there instead of what the sweep's recipe has."""
    refused: str = ""
    """Why it cannot run; empty where it can."""


class Points(Strict):
    """All of a sweep."""

    recipe: str
    """The name of the recipe that they were made from."""
    fields: list[str]
    """What varies, dotted, as the caller listed it."""
    points: list[Point] = Field(default=[])

    @property
    def runnable(self) -> list[Recipe]:
        """Of those that are not refused."""
        return [point.recipe for point in self.points if not point.refused]


def draw(recipe: Recipe, grid: Mapping[str, Any], changes: Sequence[Mapping[str, Any]], max_points: int) -> Points:
    """All combinations of the grid's values, in its order with the last field changing fastest; or the listed changes.

    Args:
        grid: dotted field -> list of values.
        changes: dotted fields -> value, for each point.
        max_points: each is a whole fine-tune, so that a sweep of more is refused.

    Raises:
        RecipeError: all mistakes of all points at once: unknown fields, bad values, names or points that stand twice.
    """
    where = f"sweep of {recipe.name}"
    listed = _listed(where, grid, changes, max_points)
    points, problems = dict[int, Point](), dict[str, list[int]]()
    for number, change in enumerate(listed, 1):
        suffix = f"-{number:0{len(str(len(listed)))}}"
        try:
            points[number] = Point(recipe=changed(recipe, change, suffix), changes=change)
        except RecipeError as error:
            for line in str(error).splitlines()[1:]:
                problems.setdefault(line.strip(), []).append(number)
    if any(str(point.recipe.publish.address).startswith("hf://") for point in points.values()):
        problems[
            "publish.address: each point would take over main on the hub; leave it out, and finetune best.yaml with it"
        ] = []
    told = [line + _at(numbers, len(listed)) for line, numbers in problems.items()]
    if told := [*told, *_twice(points)]:
        raise RecipeError.of(where, told)
    return Points(recipe=recipe.name, fields=list(dict.fromkeys(itertools.chain(*listed))), points=list(points.values()))


def changed(recipe: Recipe, changes: Mapping[str, Any], suffix: str) -> Recipe:
    """The recipe with `changes`, and `suffix` after its name, and after that of its checkpoints: points share no state.

    Raises:
        RecipeError: as of a recipe file with those fields.
    """
    content = recipe.model_dump(exclude_defaults=True)
    for field in sorted(changes, key=lambda field: field.count(".")):
        _put(content, field, changes[field])
    if "name" not in changes:
        content["name"] = _named(recipe.name, suffix)
    has_checkpoints = isinstance(content.get("checkpoints"), dict)
    if recipe.checkpoints.name and has_checkpoints and "checkpoints.name" not in changes:
        content["checkpoints"]["name"] = _named(recipe.checkpoints.name, suffix)
    return Recipe.model_validate(content)


def value_at(recipe: Recipe, field: str) -> Any:
    """What stands at a dotted field; a method or sharding that is nothing but its name is that name."""
    if field in ("method", "sharding"):
        section = getattr(recipe, field).model_dump(exclude_defaults=True)
        return section["name"] if len(section) == 1 else section
    value: Any = recipe.model_dump()
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def shown(value: Any) -> str:
    """A value as people write it in a recipe."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _listed(where: str, grid: Mapping[str, Any], changes: Sequence[Mapping[str, Any]], max_points: int) -> list[dict[str, Any]]:
    if bool(grid) == bool(changes):
        both = "both are given" if grid else "none is given"
        raise RecipeError(
            f"{where}: give a grid ({{training.learning_rate: [1e-4, 2e-4]}}) or a list of changes "
            f"([{{training.learning_rate: 1e-4}}]); {both}"
        )
    if problems := [*_bad_axes(grid), *_bad_changes(changes)]:
        raise RecipeError.of(where, problems)
    count = len(changes)
    if grid:
        count = 1
        for values in grid.values():
            count *= len(values)
    if count > max_points:
        raise RecipeError(f"{where}: {count} points, each a whole fine-tune; give fewer values, or max_points: {count}")
    if changes:
        return [dict(change) for change in changes]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _bad_axes(grid: Mapping[str, Any]) -> Iterator[str]:
    for field, values in grid.items():
        if not isinstance(values, list) or not values:
            yield f"{field}: a grid has a list of values for each field; found {values!r:.60}"
        elif twice := [value for at, value in enumerate(values) if value in values[:at]]:
            yield f"{field}: {', '.join(map(shown, twice))} stands twice"


def _bad_changes(changes: Sequence[Any]) -> Iterator[str]:
    for number, change in enumerate(changes, 1):
        if not isinstance(change, Mapping) or not change:
            yield f"changes[{number - 1}]: fields and their values; found {change!r:.60}"


def _twice(points: Mapping[int, Point]) -> Iterator[str]:
    names, contents = dict[str, list[int]](), dict[str, list[int]]()
    for number, point in points.items():
        names.setdefault(point.recipe.name, []).append(number)
        content = point.recipe.model_copy(update={"name": "", "checkpoints": Checkpoints()}).key()
        contents.setdefault(content, []).append(number)
    yield from (f"points {_numbers(twice)} have the name {name}" for name, twice in names.items() if len(twice) > 1)
    yield from (f"points {_numbers(twice)} have the same recipe" for twice in contents.values() if len(twice) > 1)


def _at(numbers: Sequence[int], count: int) -> str:
    """Which points a mistake is of, where not all have it."""
    if len(numbers) == count:
        return ""
    return f" (point{'s' * (len(numbers) > 1)} {_numbers(numbers)})"


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _put(content: dict[str, Any], field: str, value: Any) -> None:
    *sections, last = field.split(".")
    place = content
    for section in sections:
        inner = place.get(section, {})
        if isinstance(inner, str) and section in ("method", "sharding"):
            inner = {"name": inner}
        if not isinstance(inner, dict):  # a value, which has no fields: the recipe says that it knows none of this name
            content[field] = value
            return
        place[section] = inner
        place = inner
    place[last] = value


def _named(name: str, suffix: str) -> str:
    return name[: NAME_LENGTH - len(suffix)].rstrip("-") + suffix
