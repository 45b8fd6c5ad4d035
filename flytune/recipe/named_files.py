"""Files that a person's recipe names and that it holds as their content afterwards: sharding.config, files of
rewards.

Validation reads no file: a recipe holds the content. The recipe that a person gives to flytune or pyflyte
passes here before it is validated. Recipes in artifacts, checkpoints and requests of the console do not, so
that none of them reads files here.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flytune import addresses, json_core, limits, yaml_core
from flytune.errors import RecipeError
from flytune.mistakes import dotted
from flytune.recipe import fields
from flytune.recipe.recipe import Recipe
from flytune.recipe.rewards import REFERENCE
from flytune.storage import Storage
from flytune.written_files import load_json, load_yaml

FIELDS = ("sharding.config",)
"""Fields that may name a file whose content they hold."""
REWARDS = ("objective.rewards", "objective.rewards.name")
"""Fields that may name a function of a Python file: path/to/rewards.py:function."""


def read_recipe(path: str | Path, assignments: Sequence[str] = ()) -> Recipe:
    """Return the recipe in a person's own file, with the content of the files that it names.

    Args:
        assignments: fields to change first, as `training.learning_rate=1e-4`.

    Raises:
        RecipeError: a file cannot be read; or all mistakes of the recipe, one per line, with dotted paths.
    """
    content, values = load_yaml(path), fields.assigned(assignments)
    if isinstance(content, dict):
        for field in sorted(values, key=lambda field: field.count(".")):
            fields.put(content, field, values[field])
    try:
        content = with_contents(content)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    return Recipe.from_content(content, path)


def with_contents(content: Any) -> Any:
    """Return the content of a person's recipe, or of a sweep's changes to one, with files' contents in place
    of their names.

    Raises:
        RecipeError: a file is missing or not a regular file, is longer than a recipe may be, is not a JSON
            object, or has credentials; all are named.
    """
    problems: list[str] = []
    replaced = _replaced(content, (), problems)
    if problems:
        raise RecipeError.of("files that the recipe names", problems)
    return replaced


def _replaced(content: Any, loc: tuple[int | str, ...], problems: list[str]) -> Any:
    if isinstance(content, str):
        # A sweep's changes are lists of such content, and its grid has a list for each field.
        field = re.sub(r"\[\d+\]", "", dotted(loc)).lstrip(".")
        if field not in (*FIELDS, REWARDS[0]) or (field == REWARDS[0] and not REFERENCE.fullmatch(content)):
            return content
        try:
            return _function(content, dotted(loc)) if field == REWARDS[0] else _object(content, dotted(loc))
        except RecipeError as error:
            problems.append(str(error))
            return content
    if isinstance(content, Mapping):
        content = _with_function(content, loc, problems)
        return {key: _replaced(value, (*loc, key), problems) for key, value in content.items()}
    if isinstance(content, list):
        return [_replaced(value, (*loc, index), problems) for index, value in enumerate(content)]
    return content


def _with_function(
    content: Mapping[str, Any], loc: tuple[int | str, ...], problems: list[str]
) -> Mapping[str, Any]:
    """Return a reward whose name is a function of a file with the file's content; any other mapping as it
    is."""
    name = content.get("name")
    field = re.sub(r"\[\d+\]", "", dotted((*loc, "name"))).lstrip(".")
    if field != REWARDS[1] or not isinstance(name, str) or not REFERENCE.fullmatch(name):
        return content
    try:
        return {**content, **_function(name, dotted((*loc, "name")))}
    except RecipeError as error:
        problems.append(str(error))
        return content


def _function(named: str, key: str) -> dict[str, Any]:
    """Return the name and the code of a function of a Python file."""
    match = REFERENCE.fullmatch(named)
    assert match is not None
    path = match["file"]
    try:
        content = Storage(path, key, error=RecipeError, failed="cannot be read", retry=False).read(
            largest=limits.TEXT
        )
        code = content.decode()
    except FileNotFoundError:
        raise RecipeError(f"{key}: {path}: no such file") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{key}: {path}: is not UTF-8 text") from None
    try:
        names = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RecipeError(f"{key}: {path}: is not Python: {' '.join(str(error).split())[:200]}") from None
    if match["function"] not in names:
        raise RecipeError(
            f"{key}: {path}: has no function {match['function']}; it has {', '.join(sorted(names)) or 'none'}"
        )
    return {"name": match["function"], "code": code}


def _object(path: str, key: str) -> dict[str, Any]:
    try:
        content = Storage(path, key, error=RecipeError, failed="cannot be read", retry=False).read(
            largest=yaml_core.LARGEST
        )
    except FileNotFoundError:
        raise RecipeError(f"{key}: {path}: no such file") from None
    value = load_json(content, f"{key}: {path}")
    if not isinstance(value, dict):
        raise RecipeError(f"{key}: {path}: must be a JSON object; found {value!r:.60}")
    if secret := next(_secrets(value), None):
        raise RecipeError(
            f"{key}: {path}: {secret} holds a credential, which every artifact would show; name another file"
        )
    return value


def _secrets(value: Any) -> Iterator[str]:
    """Yield the keys of texts that are credentials by the key's name."""
    for key, part in json_core.entries(value):
        if isinstance(part, str) and isinstance(key, str) and addresses.names_secret(key):
            yield repr(key)[:60]
        yield from _secrets(part)
