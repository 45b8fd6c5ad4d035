"""Contents that a person wrote, in YAML or JSON: read strictly, with all mistakes at once."""

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from flytune import addresses, files, json_core, limits, yaml_core
from flytune.errors import RecipeError
from flytune.mistakes import Location, dotted, mistakes
from flytune.schema import Strict

_LARGEST = 10**18
"""Largest integer of any kind: 64 bits hold it."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters of no text: control characters but tab, line feed and carriage return; halves of surrogate
pairs."""
Model = TypeVar("Model", bound=Strict)


def load_yaml(path: str | Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        RecipeError: the file does not exist, is not text, is not YAML, or has an address with credentials.
    """
    try:
        content = yaml_core.load(files.read_regular(path, yaml_core.LARGEST))
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file{_files_beside(Path(path))}") from None
    except (OSError, ValueError) as error:  # a null character in the path is a ValueError
        raise RecipeError(f"{path!s:.200}: cannot be read: {error!s:.300}") from None
    except yaml_core.YAMLError as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    refuse_credentials(content, str(path))
    return content


def _files_beside(path: Path) -> str:
    beside = [str(file) for file in sorted(path.parent.glob("[!.]*.yaml"))]
    if not beside:
        return ""
    nearest = ", ".join(difflib.get_close_matches(str(path), beside, n=5, cutoff=0.0))
    return f"; there are: {nearest}{', ...' if len(beside) > 5 else ''}"


def load_json(content: str | bytes, where: str) -> Any:
    """Return the value of a JSON text that a person wrote.

    Raises:
        RecipeError: it is not JSON, is longer than a YAML file may be, has half of a surrogate pair, or has
            an address with credentials.
    """
    try:
        value = json_core.load(content, yaml_core.LARGEST)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RecipeError(f"{where}: not JSON: a text has half of a surrogate pair") from None
    except json_core.JSONError as error:
        raise RecipeError(f"{where}: not JSON: {error!s:.300}") from None
    refuse_credentials(value, where)
    return value


def refuse_credentials(content: Any, where: str) -> None:
    """Refuse a content that has addresses with credentials.

    Raises: RecipeError with the places of all.
    """
    secrets = [f"{dotted(loc)}: {addresses.refusal(reason)}" for loc, reason in addresses.found_in(content)]
    if secrets:
        raise RecipeError.of(where, secrets)


def load_rows(path: Path, container: type[Strict], field: str, because: str = "") -> Any:
    """Return the rows of a YAML list, validated as the `field` of `container`: models with unique names.

    Raises:
        RecipeError: the file is missing or invalid (with all its mistakes), or a name is not unique;
            `because` is appended.
    """
    rows = getattr(validated({field: load_yaml(path)}, container, str(path)), field)
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError(f"{path}: {', '.join(twice)}: each name must be unique{because}")
    return rows


def validated(content: Any, model: type[Model], where: str) -> Model:
    """Return the model of a content that a person wrote.

    Raises:
        RecipeError: it has mistakes, which are all listed.
    """
    if json_core.is_deep(content):
        raise RecipeError(
            f"{where}: mappings and lists are nested deeper than {yaml_core.DEEPEST}; flatten them"
        )
    wrong = list(wrong_values(content))
    try:
        record = model.model_validate(content)
    except ValidationError as error:
        raise RecipeError.of(where, with_others(mistakes(error, model), wrong)) from None
    if wrong:
        raise RecipeError.of(where, wrong)
    return record


def with_others(lines: list[str], others: list[str]) -> list[str]:
    """Return the lines on mistakes; of a place that has two, the one in `others`."""
    return list({line.partition(": ")[0]: line for line in [*lines, *others]}.values())


def wrong_values(value: Any, loc: Location = ()) -> Iterator[str]:
    """Yield a line for each value that pydantic accepts and nobody means: NaN, infinite, tiny, huge, control
    characters."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{dotted(loc)}: numbers must be finite; found {value}"
    elif isinstance(value, float) and 0 < abs(value) < limits.LEAST_NUMBER:
        yield (
            f"{dotted(loc)}: {value:g} is smaller than any number that has an effect; write a larger "
            "one, or 0 where it may be"
        )
    elif isinstance(value, int) and abs(value) > _LARGEST:
        yield f"{dotted(loc)}: at most {_LARGEST:.0e} is read; found a number of {len(str(value))} digits"
    elif isinstance(value, str) and (match := _CONTROL.search(value)):
        yield f"{dotted(loc)}: has the control character {match[0]!a}; remove it"
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    for key, part in parts:
        if isinstance(key, str) and _CONTROL.search(key):
            yield f"{dotted(loc)}: a key has a control character; remove it"
        yield from wrong_values(part, (*loc, key))
