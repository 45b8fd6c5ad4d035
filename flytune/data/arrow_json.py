"""JSON inside of Arrow's rows: `datasets` 5 writes columns of mixed types as `extension<arrow.json>`, whose
values are text."""

from collections.abc import Callable
from typing import Any

from flytune import json_core
from flytune.errors import DataError

Decode = Callable[[Any], Any]


def decoders(schema: Any) -> dict[str, Decode]:
    """Return a function for each column of a pyarrow schema that has JSON, which returns a value with the
    JSON parsed."""
    found = {field.name: _decoder(field.type) for field in schema}
    return {name: decode for name, decode in found.items() if decode is not None}


def decoded(row: dict[str, Any], columns: dict[str, Decode], where: str) -> dict[str, Any] | DataError:
    """Return a row with the JSON of `columns` parsed, or the error of one that is not JSON."""
    made = dict(row)
    for name, decode in columns.items():
        try:
            made[name] = decode(row.get(name))
        except json_core.JSONError as error:
            return DataError(f"{where}: column {name} has the type JSON, and a value that is not: {error}")
    return made


def _decoder(kind: Any) -> Decode | None:
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: None if value is None else json_core.load(value)
    if types.is_struct(kind):
        fields = decoders(kind)
        return (lambda value: _of_struct(value, fields)) if fields else None
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    inner = _decoder(kind.value_type) if is_list else None
    return (lambda value: value and [inner(one) for one in value]) if inner else None


def _of_struct(value: Any, fields: dict[str, Decode]) -> Any:
    return value and {name: fields[name](item) if name in fields else item for name, item in value.items()}
