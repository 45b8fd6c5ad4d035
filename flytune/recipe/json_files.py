"""JSON files that a recipe names, read into it: the run's key, its artifact and its pods then have their content."""

from typing import Any

from flytune import json_core
from flytune.errors import RecipeError
from flytune.storage import Storage


def read(path: str) -> dict[str, Any]:
    """Return the object in a JSON file, or in the one at an fsspec address.

    DeepSpeed itself reads Hjson, and Python's parser keeps the last of two equal keys.

    Raises:
        ValueError: it is not there, is refused by json_core, or is no object.
    """
    try:
        content = Storage(path, "", error=RecipeError, failed="cannot be read", retry=False).read()
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except RecipeError as error:
        raise ValueError(str(error)) from None
    try:
        return json_core.load_object(content)
    except json_core.JSONError as error:
        raise ValueError(f"{path}: {error}") from None
