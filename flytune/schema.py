"""Strict, frozen pydantic models that report all mistakes at once, with dotted paths and suggestions."""

import difflib
import json
import math
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticKnownError, core_schema

from flytune import addresses, files, json_core, limits, yaml_core
from flytune.errors import RecipeError

Location = tuple[int | str, ...]
_LARGEST = 10**18
"""Largest integer of any kind: 64 bits hold it."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters of no text: control characters but tab, line feed and carriage return; halves of surrogate
pairs."""
_LARGEST_RECORD = 2 * 10**9
"""Bytes of a record: training.json has all steps."""


def _usable(path: str) -> str:
    if path.startswith("~") and not path.startswith("~/") and path != "~":
        raise ValueError(
            f"{path:.60}: the homes of other users are not looked up; write an absolute path, or ~/..."
        )
    if "://" not in path and (
        long := [name for name in PurePosixPath(path).parts if len(name.encode()) > limits.NAME]
    ):
        raise ValueError(
            f"{long[0]:.40}...: a name of {len(long[0].encode()):,} bytes; file systems take {limits.NAME}"
        )
    return path


PathOrAddress = Annotated[str, Field(min_length=1, max_length=limits.PATH), AfterValidator(_usable)]
"""A path or address."""
Positive = Annotated[int, Field(gt=0, le=limits.COUNT)]
"""A count from 1 on."""


def _refuse_boolean(kind: Literal["int_type", "float_type"], value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticKnownError(kind)
    return value


_NUMBERS: dict[Any, Any] = {
    "int": partial(_refuse_boolean, "int_type"),
    "float": partial(_refuse_boolean, "float_type"),
}


def _without_booleans(schema: Any) -> Any:
    """Return a core schema whose numbers are not booleans, which pydantic takes for 1 and 0."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_without_booleans, schema))
    if not isinstance(schema, dict) or schema.get("metadata") == _NUMBERS:  # a section's, done before
        return schema
    without_booleans = {key: _without_booleans(part) for key, part in schema.items()}
    if not isinstance(kind := without_booleans.get("type"), str) or (refuse := _NUMBERS.get(kind)) is None:
        return without_booleans
    return core_schema.no_info_before_validator_function(
        refuse, cast(core_schema.CoreSchema, without_booleans), metadata=_NUMBERS
    )


class Strict(BaseModel):
    """Immutable model that refuses unknown keys."""

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Keys that are unknown, anywhere below this model, and what to write instead."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> Any:
        """Return the model's JSON schema, with the docstrings of its fields as their descriptions.

        pydantic's own use_attribute_docstrings reads the source of each class when it is made, which is most
        of the time of importing all models, and `inspect` loads every module that flytekit meant to load
        later (pandas, pyarrow, joblib).
        """
        made = handler(core_schema)
        properties = handler.resolve_ref_schema(made).get("properties", {})
        for owner in cls.__mro__:
            for name, text in _field_docstrings(owner).items() if issubclass(owner, Strict) else ():
                if name in owner.__annotations__ and name in properties:
                    properties[name].setdefault("description", text)
        return made

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Return the model's core schema, whose numbers are not booleans."""
        return _without_booleans(handler(source))

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
        return cls.parse(files.read_regular(path, _LARGEST_RECORD))


class RecordError(ValueError):
    """A text that is not the record that it should be."""

    def __init__(self, problems: list[str]) -> None:
        count = f"{len(problems)} mistake{'s' if len(problems) > 1 else ''}"
        super().__init__(
            f"{count}: " + "; ".join(" ".join(problem.split())[:200] for problem in problems[:3])
        )
        self.problems = problems


def load_yaml(path: str | Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        RecipeError: the file does not exist, is not text, is not YAML, or has an address with credentials.
    """
    try:
        content = yaml_core.load(files.read_regular(path, yaml_core.LARGEST))
    except FileNotFoundError:
        beside = [str(found) for found in sorted(Path(path).parent.glob("[!.]*.yaml"))]
        nearest = ", ".join(difflib.get_close_matches(str(path), beside, n=5, cutoff=0.0)) + ", ..." * (
            len(beside) > 5
        )
        raise RecipeError(f"{path}: no such file" + f"; there are: {nearest}" * bool(nearest)) from None
    except (OSError, ValueError) as error:  # a null character in the path is a ValueError
        raise RecipeError(f"{path!s:.200}: cannot be read: {error!s:.300}") from None
    except yaml_core.YAMLError as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    refuse_credentials(content, str(path))
    return content


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
    if secrets := [
        f"{dotted(loc)}: {addresses.refusal(reason)}" for loc, reason in addresses.found_in(content)
    ]:
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
        made = model.model_validate(content)
    except ValidationError as error:
        raise RecipeError.of(where, [*mistakes(error, model), *wrong]) from None
    if wrong:
        raise RecipeError.of(where, wrong)
    return made


def mistakes(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return one line for each mistake that pydantic found while it read `model`, in the order of the file.

    Of a field that may have several types, pydantic reports each, and names it in the location; here they are
    one mistake.
    """
    found: dict[Location, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        place = _followed(item["loc"], model)[0]
        if item["type"] == "union_tag_invalid":  # a union is of sections with other names
            place, item["input"] = (*place, "name"), item["input"]["name"]
        found.setdefault(place, []).append(item)
    # A list or mapping with mistakes inside was meant as one.
    outer = {place[:end] for place in found for end in range(len(place))}
    made: dict[str, str] = {}
    for place in (place for place in found if place not in outer):
        said, mark, known = _describe(found[place], model).partition(
            "; known are: "
        )  # a section's names are listed once
        made[dotted(place)] = said + (
            mark + known if not any(line.endswith(mark + known) for line in made.values()) else ""
        )
    return [f"{place}: {said}" for place, said in made.items()]


def dotted(loc: Location) -> str:
    """Return `('data', 'columns', 0)` as `data.columns[0]`."""
    parts = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return parts.lstrip(".") or "(top)"


def wrong_values(value: Any, loc: Location = ()) -> Iterator[str]:
    """Yield a line for each value that pydantic accepts and nobody means: NaN, infinite, tiny, huge, control
    characters."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{dotted(loc)}: numbers must be finite; found {value}"
    elif isinstance(value, float) and 0 < abs(value) < limits.LEAST_NUMBER:
        yield (
            f"{dotted(loc)}: {value:g} is smaller than any number that has an effect; write 0, or a "
            "larger one"
        )
    elif isinstance(value, int) and abs(value) > _LARGEST:
        yield f"{dotted(loc)}: at most {_LARGEST:.0e} is read; found a number of {len(str(value))} digits"
    elif isinstance(value, str) and (match := _CONTROL.search(value)):
        yield f"{dotted(loc)}: has the control character {match[0]!a}; remove it"
    for key, item in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        at = (*loc, key)
        if isinstance(key, str) and _CONTROL.search(key):
            yield f"{dotted(loc)}: a key has a control character; remove it"
        yield from wrong_values(item, at)


def _describe(items: list[ErrorDetails], model: type[BaseModel]) -> str:
    """Return what is wrong with a value, which has one of several types if there are several `items`."""
    item = next((item for item in items if item["type"] in ("value_error", "assertion_error")), items[0])
    kind, loc = item["type"], item["loc"]
    if kind in ("value_error", "assertion_error"):
        return item["msg"].partition(", ")[2]
    if kind == "extra_forbidden":
        return _unknown_key(str(loc[-1]), _followed(loc, model)[1], model)
    if kind == "missing":
        return "missing; the recipe must say it" if model.__name__ == "Recipe" else "missing"
    first, *others = dict.fromkeys(map(_expected, items))
    is_key = loc[-1:] == ("[key]",) or kind == "invalid_key"
    wanted = " or ".join([first, *(other.removeprefix("be ") for other in others)])
    return f"{'the key ' if is_key else ''}must {wanted}; found {_shown(item['input'])}"


def _unknown_key(key: str, sections: list[Any], model: type[BaseModel]) -> str:
    if advice := getattr(model, "elsewhere", {}).get(key):
        return f"unknown key; {advice}"
    known = [name for section in sections if is_model(section) for name in section.model_fields]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)  # one or two other letters
    return (
        f"unknown key; did you mean {close[0]}?" if close else f"unknown key; known are: {', '.join(known)}"
    )


EXPECTED = {
    **dict.fromkeys(("model", "dict", "dataclass"), "be a mapping"),
    **dict.fromkeys(("string", "invalid"), "be a string"),
    **dict.fromkeys(("list", "tuple"), "be a list"),
    "bool": "be true or false",
    "int": "be an integer",
    "float": "be a number",
    "unexpected": "be left out",
    "finite": "be a finite number",
    "datetime": "be a date and time (2026-01-31T12:00:00Z)",
    "literal": "be {expected}",
    "union_tag_invalid": "be {expected_tags}",
    "greater_than": "be greater than {gt}",
    "greater_than_equal": "be {ge} or greater",
    "multiple_of": "be a multiple of {multiple_of}",
    "less_than": "be less than {lt}",
    "less_than_equal": "be {le} or less",
    "too_short": "have {min_length} or more entries",
    "too_long": "have {max_length} entries at most",
    "string_too_short": "have {min_length} or more characters",
    "string_too_long": "have {max_length} characters at most",
}
"""Predicates after "must", by the types of pydantic's errors, or by their first words."""
FORMS = {
    r"^[a-z0-9][a-z0-9-]{0,62}$": "be 1 to 63 lower-case letters, digits and dashes, and begin with no dash",
    r"^[a-z][a-z0-9-]{0,62}$": "be 1 to 63 lower-case letters, digits and dashes, and begin with a letter",
    r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$": "be 1 to 63 lower-case letters, digits and dashes, with no dash "
    "at its ends",
    r"^[A-Z][A-Z0-9_]*$": "be capital letters, digits and underscores, and begin with a letter",
    r"^[0-9a-f]{64}$": "be a SHA-256 of 64 hexadecimal digits",
    r"^([0-9a-f]{64})?$": "be empty or a SHA-256 of 64 hexadecimal digits",
    r"^(gaussian|pissa|pissa_niter_[1-9]\d{0,3})$": "be 'gaussian', 'pissa' or 'pissa_niter_NUMBER'",
    r"^\d{4}-\d\d-\d\d$": "be a day, as in 2026-11-30",
    "^/": "be an absolute path",
}
"""Predicates after "must", by the patterns of fields."""


def _expected(item: ErrorDetails) -> str:
    context = item.get("ctx", {})
    if item["type"] == "string_pattern_mismatch":
        return FORMS.get(context["pattern"], "have another form")
    shown = {
        key: f"{x:,.15g}" if isinstance(x, int | float) else str(x).replace("True", "true")
        for key, x in context.items()
    }
    wanted = EXPECTED.get(item["type"]) or EXPECTED.get(item["type"].partition("_")[0], "be another value")
    return " or ".join(wanted.format(**shown).rsplit(", ", item["type"] == "union_tag_invalid"))


def _shown(value: Any) -> str:
    """Return a value as its file has it, in 60 characters at most."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return (
        f"{value!r:.60}"
        if isinstance(value, str | int | float | list | dict | tuple)
        else type(value).__name__
    )


def _followed(loc: Location, model: type[BaseModel]) -> tuple[Location, list[Any]]:
    """Return a place without pydantic's names of a union's types, and the types that hold its last part."""
    holders: list[Any] = []
    types_here, place, is_chosen = [model], list[int | str](), False
    for part in loc:
        holders = [alternative for annotation in types_here for alternative in alternatives(annotation)]
        if len(holders) > 1 and not is_chosen:
            types_here, is_chosen = holders, True
        elif part != "[key]":
            types_here, is_chosen = [inner for holder in holders for inner in _inner(holder, part)], False
            place.append(part)
    return tuple(place), holders


def alternatives(annotation: Any) -> list[Any]:
    """Return the types that a value may have, apart from None."""
    if (origin := typing.get_origin(annotation)) is Annotated:
        return alternatives(typing.get_args(annotation)[0])
    if origin not in (typing.Union, types.UnionType):
        return [annotation]
    return [
        alternative
        for part in typing.get_args(annotation)
        if part is not type(None)
        for alternative in alternatives(part)
    ]


def _inner(annotation: Any, part: int | str) -> list[Any]:
    """Return the types of the value at a key or index of a value."""
    if is_model(annotation):
        return [field.annotation] if (field := annotation.model_fields.get(str(part))) else []
    arguments = typing.get_args(annotation)
    return [arguments[-1]] if arguments and typing.get_origin(annotation) in (dict, list) else []


def is_model(annotation: Any) -> bool:
    """Return whether a type is one of these models."""
    return (
        isinstance(annotation, type) and not typing.get_args(annotation) and issubclass(annotation, BaseModel)
    )


def _field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of the fields that a class declares itself, by field."""
    file = getattr(sys.modules.get(model.__module__), "__file__", None)
    return _docstrings_of(file).get(model.__qualname__, {}) if file else {}


@cache
def _docstrings_of(file: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of the attributes of all classes in a source file, by qualified name of the
    class."""
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
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                    if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                    if isinstance(text.value.value, str)
                }
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                visit(child, f"{prefix}{child.name}.<locals>.")

    visit(ast.parse(Path(file).read_bytes()), "")
    return found
