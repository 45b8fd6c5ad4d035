"""Rewards of this project: pure functions of a completion and the columns of its row, 1 or 0.

The process that computes rewards reads this file by its path, so it imports nothing but Python's own library.
"""

import json
import re
from collections.abc import Callable
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_MARK = "####"


def exact_answer(completion: str, reference: Any) -> float:
    """Return 1 if the final answers of a completion and of the reference are equal, as GSM8K compares them.

    The final answer is the text after the last `####`, else that in the last `\\boxed{}`, else the last
    number; without any of them it is all of the text. Numbers are compared as numbers, without thousands
    separators, units and currencies.
    """
    if isinstance(reference, bool) or not isinstance(reference, str | int | float):
        raise TypeError(f"the reference must be text or a number, found {type(reference).__name__}")
    return float(bool(completion.strip()) and _final(completion) == _final(str(reference)))


def _final(text: str) -> str | float:
    marked = text.rpartition(_MARK)[2] if _MARK in text else (_BOXED.findall(text) or [text])[-1]
    if numbers := _NUMBER.findall(marked):
        return float((numbers[0] if _MARK in text else numbers[-1]).replace(",", ""))
    return " ".join(marked.split()).casefold().rstrip(".")


def regular_expression(completion: str, pattern: str) -> float:
    """Return 1 if all of a completion, without space around it, matches; a dot matches line breaks too."""
    return float(re.fullmatch(pattern, completion.strip(), re.DOTALL) is not None)


def code_of(completion: str) -> str:
    """Return the last fenced block of a completion, or all of it where there is none."""
    return (_FENCE.findall(completion) or [completion])[-1]


def json_schema(completion: str, schema: Any) -> float:
    """Return 1 if a completion, or its last fenced block, is JSON that a schema accepts."""
    schema = json.loads(schema) if isinstance(schema, str) else schema
    _check_schema(schema, "schema")
    try:
        value = json.loads(code_of(completion), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    return float(_accepts(schema, value))


def _refuse(text: str) -> None:
    raise ValueError(text)


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "number": (int, float),
    "integer": (int,),
}
_NOTES = ("$schema", "$id", "title", "description", "default", "examples", "$comment")
_KEYS = (
    "type",
    "enum",
    "const",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "anyOf",
    "allOf",
    "oneOf",
    "not",
)


def _check_schema(schema: Any, place: str) -> None:
    """Raise a ValueError for a part of a schema that is not compared."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{place}: must be a JSON schema, found {type(schema).__name__}")
    if unknown := [key for key in schema if key not in (*_KEYS, *_NOTES)]:
        raise ValueError(f"{place}: the keyword {unknown[0]} is not compared; known are {', '.join(_KEYS)}")
    kinds = schema.get("type", [])
    if unknown := [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind not in _TYPES]:
        raise ValueError(f"{place}.type: {unknown[0]!r} is not a type")
    parts = {f"properties.{name}": part for name, part in schema.get("properties", {}).items()}
    parts |= {name: schema[name] for name in ("items", "additionalProperties", "not") if name in schema}
    parts |= {
        f"{name}[{at}]": part
        for name in ("anyOf", "allOf", "oneOf")
        for at, part in enumerate(schema.get(name, []))
    }
    for name, part in parts.items():
        _check_schema(part, f"{place}.{name}")


def _is_type(value: Any, kind: str) -> bool:
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _accepts(schema: Any, value: Any) -> bool:
    if isinstance(schema, bool):
        return schema
    kinds = schema.get("type")
    if kinds is not None and not any(
        _is_type(value, kind) for kind in (kinds if isinstance(kinds, list) else [kinds])
    ):
        return False
    if "const" in schema and not _equal(value, schema["const"]):
        return False
    if "enum" in schema and not any(_equal(value, part) for part in schema["enum"]):
        return False
    if not isinstance(value, bool) and not all(
        accepts(schema, value) for kind, accepts in _BY_KIND if isinstance(value, kind)
    ):
        return False
    chosen = [_accepts(part, value) for part in schema.get("oneOf", [])]
    return (
        all(_accepts(part, value) for part in schema.get("allOf", []))
        and ("anyOf" not in schema or any(_accepts(part, value) for part in schema["anyOf"]))
        and ("oneOf" not in schema or sum(chosen) == 1)
        and ("not" not in schema or not _accepts(schema["not"], value))
    )


def _equal(first: Any, other: Any) -> bool:
    return bool(first == other) and isinstance(first, bool) == isinstance(other, bool)


def _accepts_object(schema: dict[str, Any], value: dict[str, Any]) -> bool:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    return all(name in value for name in schema.get("required", [])) and all(
        _accepts(known.get(name, others), part) for name, part in value.items()
    )


def _accepts_array(schema: dict[str, Any], value: list[Any]) -> bool:
    fits = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
    return fits and all(_accepts(schema.get("items", True), item) for item in value)


def _accepts_text(schema: dict[str, Any], value: str) -> bool:
    return bool(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)))


def _accepts_number(schema: dict[str, Any], value: float) -> bool:
    return bool(
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
    )


_BY_KIND: tuple[tuple[type | tuple[type, ...], Callable[[dict[str, Any], Any], bool]], ...] = (
    (dict, _accepts_object),
    (list, _accepts_array),
    (str, _accepts_text),
    ((int, float), _accepts_number),
)


def tests_of(tests: Any) -> str:
    """Return the unit tests of a row as one text: statements, as text or a list."""
    lines = tests if isinstance(tests, list) else [tests]
    if not lines or not all(isinstance(line, str) and line.strip() for line in lines):
        raise TypeError("tests must be statements (assert ...), as text or as a list of texts")
    return "\n".join(lines)
