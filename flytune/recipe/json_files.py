"""JSON files that a recipe names, read into it: the run's key, its artifact and its pods then have their content."""

import json
from typing import Any

from flytune.errors import RecipeError
from flytune.storage import Storage


def read(path: str) -> dict[str, Any]:
    """Return the object in a JSON file, or in the one at an fsspec address.

    DeepSpeed itself reads Hjson, and Python's parser keeps the last of two equal keys.

    Raises:
        ValueError: it is not there, is not JSON, has a key twice or a number that JSON has not, or is no object.
    """
    try:
        text = Storage(path, "", error=RecipeError, failed="cannot be read", retry=False).read().decode("utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    except RecipeError as error:
        raise ValueError(str(error)) from None
    try:
        content = json.loads(text, object_pairs_hook=_unique, parse_constant=_not_json)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a JSON object, found {content!r:.60}")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)}: twice in one object; remove one")
    return dict(pairs)


def _not_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")
