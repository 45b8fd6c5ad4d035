"""Strict, frozen pydantic models that report all mistakes at once, with dotted paths and suggestions."""

import difflib
import json
import math
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError
from pydantic_core import ErrorDetails

from flytune import addresses, json_core, limits, yaml_core
from flytune.errors import RecipeError

_LARGEST = 10**18
"""Largest integer of any kind: 64 bits hold it."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters of no text: control characters but tab, line feed and carriage return; halves of surrogate pairs."""
_LARGEST_RECORD = 2 * 10**9
"""Bytes of a record: training.json has all steps."""


def _usable(path: str) -> str:
    if path.startswith("~") and not path.startswith("~/") and path != "~":
        raise ValueError(f"{path:.60}: the homes of other users are not looked up; write an absolute path, or ~/...")
    if "://" not in path and (long := [name for name in PurePosixPath(path).parts if len(name.encode()) > limits.NAME]):
        raise ValueError(f"{long[0]:.40}...: a name of {len(long[0].encode()):,} bytes; file systems take {limits.NAME}")
    return path


PathOrAddress = Annotated[str, Field(min_length=1, max_length=limits.PATH), AfterValidator(_usable)]
"""A path or address."""
Positive = Annotated[int, Field(gt=0, le=limits.COUNT)]
"""A count from 1 on."""


class Strict(BaseModel):
    """Immutable model that refuses unknown keys."""

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Keys of other tools, anywhere below this model, and what to write instead."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> Any:
        """Return the model's JSON schema, with the docstrings of its fields as their descriptions.

        pydantic's own use_attribute_docstrings reads the source of each class when it is made, which is most of the time of
        importing all models, and `inspect` loads every module that flytekit meant to load later (pandas, pyarrow, joblib).
        """
        made = handler(core_schema)
        properties = handler.resolve_ref_schema(made).get("properties", {})
        for owner in cls.__mro__:
            for name, text in _field_docstrings(owner).items() if issubclass(owner, Strict) else ():
                if name in owner.__annotations__ and name in properties:
                    properties[name].setdefault("description", text)
        return made

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @classmethod
    def parse(cls, content: str | bytes) -> Self:
        """Return the record of a JSON text.

        Raises:
            RecordError: the text is not JSON, or is no such record; with all mistakes.
        """
        try:
            return cls.model_validate(json_core.load(content, _LARGEST_RECORD))
        except json_core.JSONError as error:
            raise RecordError([f"not JSON: {error}"]) from None
        except ValidationError as error:
            raise RecordError(mistakes(error, cls)) from None


Model = TypeVar("Model", bound=Strict)


class Record(Strict):
    """Record that is stored as a JSON file."""

    def write(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the record in a file.

        Raises:
            RecordError: it is no such record.
            OSError: it cannot be read.
        """
        return cls.parse(path.read_bytes())


class RecordError(ValueError):
    """A text that is not the record that it should be."""

    def __init__(self, problems: list[str]) -> None:
        count = f"{len(problems)} mistake{'s' if len(problems) > 1 else ''}"
        super().__init__(f"{count}: " + "; ".join(" ".join(problem.split())[:200] for problem in problems[:3]))
        self.problems = problems


def load_yaml(path: str | Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        RecipeError: the file does not exist, is not text, is not YAML, or has an address with credentials.
    """
    try:
        with Path(path).open("rb") as file:
            content = yaml_core.load(file)
    except FileNotFoundError:
        beside = sorted(str(found) for found in Path(path).parent.glob("*.yaml"))
        hint = f"; there are: {', '.join(beside)}" if beside else ""
        raise RecipeError(f"{path}: no such file{hint}") from None
    except (OSError, ValueError) as error:  # a null character in the path is a ValueError
        raise RecipeError(f"{path!s:.200}: cannot be read: {error!s:.300}") from None
    except yaml_core.YAMLError as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    refuse_credentials(content, str(path))
    return content


def load_json(content: str | bytes, where: str) -> Any:
    """Return the value of a JSON text that a person wrote.

    Raises:
        RecipeError: it is not JSON, is longer than a YAML file may be, has half of a surrogate pair, or has an address with
            credentials.
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

    Raises:
        RecipeError: it has some; all are named, and none is shown.
    """
    if secrets := [f"{dotted(loc)}: {addresses.refusal(reason)}" for loc, reason in addresses.found_in(content)]:
        raise RecipeError.of(where, secrets)


def load_rows(path: Path, container: type[Strict], field: str, because: str = "") -> Any:
    """Return the rows of a YAML list, validated as the `field` of `container`: models with unique names.

    Raises:
        RecipeError: the file is missing or invalid (with all its mistakes), or a name is not unique; `because` is appended.
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
    if is_deep(content):
        raise RecipeError(f"{where}: mappings and lists are nested deeper than {yaml_core.DEEPEST}; flatten them")
    wrong = list(wrong_values(content, model))
    try:
        made = model.model_validate(content)
    except ValidationError as error:
        raise RecipeError.of(where, [*mistakes(error, model), *wrong]) from None
    if wrong:
        raise RecipeError.of(where, wrong)
    return made


def mistakes(error: ValidationError, model: type[Strict]) -> list[str]:
    """Return one line for each mistake that pydantic found while it read `model`, in the order of the file."""
    return [f"{dotted(item['loc'])}: {_describe(item, model)}" for item in error.errors()]


def dotted(loc: tuple[int | str, ...]) -> str:
    """Return `('data', 'columns', 0)` as `data.columns[0]`."""
    parts = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return parts.lstrip(".") or "(top)"


def wrong_values(value: Any, model: type[BaseModel], loc: tuple[int | str, ...] = ()) -> Iterator[str]:
    """Yield a line for each value that pydantic would accept although nobody means it.

    These are true for 1, infinities, NaN, numbers of more digits than a float has room for, and texts with control characters.
    """
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{dotted(loc)}: numbers must be finite; found {value}"
    elif isinstance(value, int) and abs(value) > _LARGEST:
        yield f"{dotted(loc)}: at most {_LARGEST:.0e} is read; found a number of {len(str(value))} digits"
    elif isinstance(value, str) and (found := _CONTROL.search(value)):
        yield f"{dotted(loc)}: has the control character {found[0]!a}; remove it"
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        at = (*loc, key)
        field = model.model_fields.get(str(key)) if isinstance(value, dict) else None
        if isinstance(item, bool) and field is not None and _is_number(field.annotation):
            yield f"{dotted(at)}: must be a number; found {str(item).lower()}"
        if isinstance(key, str) and _CONTROL.search(key):
            yield f"{dotted(loc)}: a key has a control character; remove it"
        yield from wrong_values(item, next(_models(field.annotation), model) if field is not None else model, at)


def is_deep(value: Any) -> bool:
    """Return whether mappings and lists are inside each other more often than any file may have them."""
    level = [value]
    for _ in range(yaml_core.DEEPEST + 1):
        level = [
            part for one in level if isinstance(one, dict | list) for part in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True


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


def _field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of the fields that a class declares itself, by field."""
    file = getattr(sys.modules.get(model.__module__), "__file__", None)
    return _docstrings_of(file).get(model.__qualname__, {}) if file else {}


@cache
def _docstrings_of(file: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of the attributes of all classes in a source file, by qualified name of the class."""
    import ast
    import inspect

    found: dict[str, dict[str, str]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                body = zip(child.body, child.body[1:], strict=False)
                found[prefix + child.name] = {
                    field.target.id: inspect.cleandoc(text.value.value)
                    for field, text in body
                    if isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)
                    and isinstance(text.value.value, str)
                }
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                visit(child, f"{prefix}{child.name}.<locals>.")

    visit(ast.parse(Path(file).read_bytes()), "")
    return found
