"""Dotted fields of a recipe's content, which sweeps and `--set` change."""

from collections.abc import Iterable
from typing import Any

from flytune import yaml_core
from flytune.errors import RecipeError
from flytune.written_files import refuse_credentials

_LONGEST_FIELD = 200


def problem(field: Any) -> str | None:
    """Return what is wrong with the name of a field; None if nothing."""
    if not isinstance(field, str):
        return f"{field!r:.60}: no name of a field; write it as in training.learning_rate"
    if len(field) > _LONGEST_FIELD or not all(field.split(".")):
        return f"{field:.60}: no name of a field; write it as in training.learning_rate"
    return None


def put(content: dict[str, Any], field: str, value: Any) -> None:
    """Put a value into a dotted field of a recipe's content."""
    *sections, last = field.split(".")
    parent = content
    for section in sections:
        inner = parent.get(section, {})
        if isinstance(inner, str) and section in ("method", "sharding", "objective"):
            inner = {"name": inner}
        if not isinstance(inner, dict):  # a value without fields: validation reports the unknown field
            content[field] = value
            return
        parent[section] = inner
        parent = inner
    parent[last] = value


def assigned(assignments: Iterable[str]) -> dict[str, Any]:
    """Return the values of `field=value` texts by their fields; values are YAML, as in a recipe.

    Raises:
        RecipeError: a text is not of that form, or names a field twice; all such texts are listed.
    """
    values: dict[str, Any] = {}
    problems = []
    for text in assignments:
        field, equals, value = text.partition("=")
        wrong = (
            problem(field)
            if equals
            else f"{text:.60}: no value; write field=value, as in training.learning_rate=1e-4"
        )
        if wrong or field in values:
            problems.append(wrong or f"{field}: is set twice; keep one")
            continue
        try:
            values[field] = yaml_core.load(value)
        except yaml_core.YAMLError as error:
            problems.append(f"{field}: not YAML: {' '.join(str(error).split())}")
    if problems:
        raise RecipeError.of("--set", problems)
    refuse_credentials(values, "--set")
    return values
