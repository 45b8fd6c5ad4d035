"""Inputs of a workflow as a person writes them: JSON, or a file of YAML or JSON, read as strictly as recipes
are."""

from typing import Any, get_origin

from flytune import files, yaml_core
from flytune.errors import RecipeError
from flytune.written_files import load_json, load_yaml


def content(value: str, name: str, kind: Any) -> Any:
    """Return the content of an input; the readers of Flyte's SDKs are not strict, and read YAML 1.1.

    Raises:
        RecipeError: it cannot be read, or is not of the input's type.
    """
    if value.lstrip().startswith(("{", "[")):
        found = load_json(value, name)
    elif value.endswith(".json"):
        try:
            found = load_json(files.read_regular(value, yaml_core.LARGEST), value)
        except (OSError, ValueError) as error:
            raise RecipeError(f"{name}: {value:.200}: cannot be read: {error!s:.300}") from None
    elif kind in (dict, list) and value.strip() in ("null", ""):
        raise RecipeError(f"{name}: empty; give JSON or a file")
    else:
        found = load_yaml(value)
    wanted = list if (get_origin(kind) or kind) is list else dict
    if not isinstance(found, wanted):
        shown = "a list" if wanted is list else "a mapping"
        raise RecipeError(f"{name}: must be {shown}; found {found!r:.60}")
    return found
