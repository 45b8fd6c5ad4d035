"""Inputs of a workflow as a person writes them: JSON, or a file of YAML or JSON, read as strictly as recipes
are."""

from collections.abc import Callable
from typing import Any, get_origin

from flytune import files, yaml_core
from flytune.errors import RecipeError
from flytune.recipe import named_files
from flytune.recipe.recipe import Recipe
from flytune.written_files import load_json, load_yaml

CHANGES: tuple[Any, ...] = (dict, list[dict])  # type: ignore[type-arg]  # as in the sweep's signature
"""Types of a sweep's grid and changes."""


def content(value: str, name: str, kind: Any) -> Any:
    """Return the content of an input; the readers of Flyte's SDKs are not strict, and read YAML 1.1.

    Raises:
        RecipeError: it cannot be read, or is not of the input's type.
    """
    if value.lstrip().startswith(("{", "[")):
        parsed = load_json(value, name)
    elif value.endswith(".json"):
        try:
            parsed = load_json(files.read_regular(value, yaml_core.LARGEST), value)
        except (OSError, ValueError) as error:
            raise RecipeError(f"{name}: {value:.200}: cannot be read: {error!s:.300}") from None
    elif kind in (dict, list) and value.strip() in ("null", ""):
        raise RecipeError(f"{name}: empty; give JSON or a file")
    else:
        parsed = load_yaml(value)
    wanted = list if (get_origin(kind) or kind) is list else dict
    if not isinstance(parsed, wanted):
        shown = "a list" if wanted is list else "a mapping"
        raise RecipeError(f"{name}: must be {shown}; found {parsed!r:.60}")
    return parsed


def read(value: Any, name: str, kind: Any, otherwise: Callable[[], Any]) -> Any:
    """Return the content of an input as a person writes it, with that of the files that it names.

    Args:
        value: JSON, or a path; of any other type, `otherwise` reads it.
        name: the input, for errors.
        kind: its type.
        otherwise: the SDK's reader.

    Raises:
        RecipeError: it cannot be read.
    """
    parsed = content(value, name, kind) if isinstance(value, str) else otherwise()
    return named_files.with_contents(parsed) if kind is Recipe or kind in CHANGES else parsed
