"""Strict, frozen pydantic models, and those that are stored as JSON files."""

import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core import PydanticKnownError, core_schema

from flytune import files, json_core, limits
from flytune.mistakes import mistakes

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


def omitted(default: Any) -> Any:
    """Return the default of a field that is written only where it has another value."""
    return Field(default=default, exclude_if=lambda value: value == default)


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
    kind = without_booleans.get("type")
    if not isinstance(kind, str) or (refuse := _NUMBERS.get(kind)) is None:
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
        content = handler(core_schema)
        properties = handler.resolve_ref_schema(content).get("properties", {})
        for owner in cls.__mro__:
            for name, text in _field_docstrings(owner).items() if issubclass(owner, Strict) else ():
                if name in owner.__annotations__ and name in properties:
                    properties[name].setdefault("description", text)
        return content

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

    docstrings: dict[str, dict[str, str]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                body = zip(child.body, child.body[1:], strict=False)
                docstrings[prefix + child.name] = {
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
    return docstrings
