"""Types and values of stages with those of an orchestrator in the place of stored files, folders, tables and
failures."""

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Union


def replaced(kind: Any, own: Mapping[Any, Any]) -> Any:
    """Return a type with the orchestrator's `own` types in the place of those of stages, in containers and
    unions too."""
    if kind in own:
        return own[kind]
    parts = tuple(replaced(part, own) for part in typing.get_args(kind))
    if not parts:
        return kind
    if _is_union(kind):
        return Union[parts]  # noqa: UP007 (made of a tuple)
    return typing.get_origin(kind)[parts]


def converted(value: Any, kind: Any, own: Mapping[Any, Any], convert: Callable[[Any, Any], Any]) -> Any:
    """Return a value of a type with each value of a type in `own` converted by `convert(value, its type)`."""
    if kind in own:
        return convert(value, kind)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if value is None or not parts:
        return value
    if _is_union(kind):
        (inner,) = [part for part in parts if part is not type(None)] if type(None) in parts else [Any]
        return converted(value, inner, own, convert)
    if origin is list:
        return [converted(one, parts[0], own, convert) for one in value]
    if origin is dict:
        return {name: converted(one, parts[1], own, convert) for name, one in value.items()}
    return value


def _is_union(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) or typing.get_origin(kind) is Union
