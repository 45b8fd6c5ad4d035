"""Types and values of stages in those of an orchestrator, and functions that have them as their inputs."""

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

OWN = ("orchestrator", "report")
"""Parameters that are not inputs."""


class TypePair(NamedTuple):
    """A type of stages, and what the orchestrator has in its place."""

    type: Any
    """Type of the orchestrator."""
    to_stage: Callable[[Any], Any]
    from_stage: Callable[[Any], Any]


@dataclass(frozen=True)
class ValueTypes:
    """Translation of types and values, in containers and unions too; those without a pair are the same."""

    pairs: Mapping[Any, TypePair]

    def type_of(self, kind: Any) -> Any:
        """Return the orchestrator's type in the place of a stage's."""
        if kind in self.pairs:
            return self.pairs[kind].type
        if hasattr(kind, "_fields"):
            fields = [(name, self.type_of(hint)) for name, hint in hints_of(kind).items()]
            return named_tuple(kind.__name__, fields)
        parts = tuple(self.type_of(part) for part in typing.get_args(kind))
        if not parts:
            return kind
        if _is_union(kind):
            return Union[parts]  # noqa: UP007 (made of a tuple)
        return typing.get_origin(kind)[parts]

    def to_stage(self, value: Any, kind: Any) -> Any:
        """Return a value of the orchestrator as stages have it."""
        return self._converted(value, kind, lambda pair: pair.to_stage)

    def from_stage(self, value: Any, kind: Any) -> Any:
        """Return a value of a stage as the orchestrator has it; a named tuple as a tuple."""
        if hasattr(kind, "_fields"):
            return tuple(self.from_stage(getattr(value, name), hint) for name, hint in hints_of(kind).items())
        return self._converted(value, kind, lambda pair: pair.from_stage)

    def signature(self, function: Callable[..., Any], result: Any = None) -> inspect.Signature:
        """Return the signature of a function in the orchestrator's types; `result` is its type, if it is
        another."""
        kinds = hints_of(function)
        parameters = [
            parameter.replace(annotation=self.type_of(kinds[name]))
            for name, parameter in inspect.signature(function).parameters.items()
            if name not in OWN
        ]
        return inspect.Signature(parameters, return_annotation=result or self.type_of(kinds["return"]))

    def _converted(self, value: Any, kind: Any, choose: Callable[[TypePair], Callable[[Any], Any]]) -> Any:
        if kind in self.pairs:
            return choose(self.pairs[kind])(value)
        origin, parts = typing.get_origin(kind), typing.get_args(kind)
        if value is None or not parts:
            return value
        if _is_union(kind):
            (inner,) = [part for part in parts if part is not type(None)] if type(None) in parts else [Any]
            return self._converted(value, inner, choose)
        if origin is list:
            return [self._converted(item, parts[0], choose) for item in value]
        if origin is dict:
            return {name: self._converted(item, parts[1], choose) for name, item in value.items()}
        return value


def hints_of(function: Any) -> dict[str, Any]:
    """Return the types of a function's parameters and of its result, or of the fields of a named tuple."""
    return typing.get_type_hints(function, include_extras=True)


def named_tuple(name: str, fields: Iterable[tuple[str, Any]]) -> Any:
    """Return the type of several outputs."""
    return NamedTuple(name, fields)


def as_function(
    body: Any, of: Callable[..., Any], module: str, name: str, signature: inspect.Signature
) -> Any:
    """Return `body` as a function of a module, with a signature and the description of the function `of`.

    Both SDKs load a task by its module and name, and read its inputs from its signature.
    """
    if "<locals>" in body.__qualname__:
        # flytekit takes an inner function only where it wraps one of a module.
        body.__wrapped__ = of
    body.__name__ = body.__qualname__ = name
    body.__module__, body.__doc__ = module, of.__doc__
    body.__annotations__ = {
        parameter.name: parameter.annotation for parameter in signature.parameters.values()
    }
    body.__annotations__["return"] = signature.return_annotation
    body.__signature__ = signature
    return body


def _is_union(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) or typing.get_origin(kind) is Union
