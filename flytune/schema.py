"""Strict, frozen pydantic models that report all mistakes at once, with dotted paths and suggestions."""

import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from flytune import yaml_core
from flytune.errors import RecipeError


class Strict(BaseModel):
    """Immutable model that refuses unknown keys."""

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Keys of other tools, anywhere below this model, and what to write instead."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


class Record(Strict):
    """Record that is stored as a JSON file."""

    def write(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


def load_yaml(path: str | Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        RecipeError: the file does not exist, is not text, or is not YAML.
    """
    try:
        with Path(path).open("rb") as file:
            return yaml_core.load(file)
    except FileNotFoundError:
        beside = sorted(str(found) for found in Path(path).parent.glob("*.yaml"))
        hint = f"; there are: {', '.join(beside)}" if beside else ""
        raise RecipeError(f"{path}: no such file{hint}") from None
    except (OSError, ValueError) as error:  # a null character in the path is a ValueError
        raise RecipeError(f"{path!s:.200}: cannot be read: {error!s:.300}") from None
    except yaml_core.YAMLError as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None


def load_rows(path: Path, container: type[Strict], field: str, because: str = "") -> Any:
    """Return the rows of a YAML list, validated as the `field` of `container`: models with unique names.

    Raises:
        RecipeError: the file is missing or invalid (with all its mistakes), or a name is not unique; `because` is appended.
    """
    try:
        rows = getattr(container.model_validate({field: load_yaml(path)}), field)
    except ValidationError as error:
        raise RecipeError.of(str(path), mistakes(error, container)) from None
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError(f"{path}: {', '.join(twice)}: each name must be unique{because}")
    return rows


def mistakes(error: ValidationError, model: type[Strict]) -> list[str]:
    """Return one line for each mistake that pydantic found while it read `model`, in the order of the file."""
    return [f"{dotted(item['loc'])}: {_describe(item, model)}" for item in error.errors()]


def dotted(loc: tuple[int | str, ...]) -> str:
    """Return `('data', 'columns', 0)` as `data.columns[0]`."""
    parts = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return parts.lstrip(".") or "(top)"


def wrong_numbers(value: Any, model: type[BaseModel], loc: tuple[int | str, ...] = ()) -> Iterator[str]:
    """Yield a line for each number that pydantic would accept although nobody means it: true for 1, infinities, NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{dotted(loc)}: numbers must be finite; found {value}"
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        at = (*loc, key)
        field = model.model_fields.get(str(key)) if isinstance(value, dict) else None
        if isinstance(item, bool) and field is not None and _is_number(field.annotation):
            yield f"{dotted(at)}: must be a number; found {str(item).lower()}"
        yield from wrong_numbers(item, next(_models(field.annotation), model) if field is not None else model, at)


def _is_number(annotation: Any) -> bool:
    """Return whether a type takes numbers, and neither true and false nor texts."""
    kinds = set(_kinds(annotation))
    return bool(kinds & {int, float}) and bool not in kinds


def _kinds(annotation: Any) -> Iterator[Any]:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        arguments = arguments[:1]
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _kinds(argument)


def _describe(item: ErrorDetails, model: type[Strict]) -> str:
    if item["type"] == "extra_forbidden":
        if (key := str(item["loc"][-1])) in model.elsewhere:
            return f"unknown key; {model.elsewhere[key]}"
        known = list(_section(model, item["loc"][:-1]).model_fields)
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        return f"unknown key; did you mean {close[0]}?" if close else f"unknown key; known are: {', '.join(known)}"
    if item["type"] == "missing":
        return "missing; the recipe must say it" if model.__name__ == "Recipe" else "missing"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return message
    return f"{message[0].lower()}{message[1:]}; found {item['input']!r:.60}"


def _section(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the model at `loc` below `model`."""
    for part in loc:
        field = model.model_fields.get(str(part))
        if field is not None:
            model = next(_models(field.annotation), model)
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _models(argument)
