"""Rewards of this project: pure functions of a completion and the columns of its row, 1 or 0.

The process that computes rewards reads this file by its path, so it imports nothing but Python's own library.
"""

import json
import re
from collections.abc import Callable
from typing import Any

_NUMBER = re.compile(
    r"[-+]?(?:(?:\d+(?:,\d{2,3})*,\d{3}(?!\d)|\d+)(?:\.\d*)?|\.\d+)(?: ?/ ?\d+)?",
)
"""A number, with separators of thousands, or a fraction of two."""
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LATEX = (
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"(?<=\d)(?=\\[dt]?frac)"), " "),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r"\1/\2"),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[,;:! ]|\\?\$|\\(?=%)"), ""),
    (re.compile(r"\{,\}"), ","),
)
"""Commands of LaTeX around numbers and words, and what is read in their place."""
_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_MARK = "####"


def exact_answer(completion: str, reference: Any) -> float:
    """Return 1 if the final answers of a completion and of the reference are equal, as GSM8K compares them.

    The final answer is the text after the last `####`, else that in the last `\\boxed{}`, else the last
    number; without any of them it is all of the text. Numbers and fractions are compared as numbers, without
    thousands separators, units and currencies. What is in a box and has several numbers (a root, a pair) is
    compared as text.
    """
    if isinstance(reference, bool) or not isinstance(reference, str | int | float):
        raise TypeError(f"the reference must be text or a number, found {type(reference).__name__}")
    return float(bool(completion.strip()) and _final(completion) == _final(str(reference)))


def _final(text: str) -> str | float:
    boxed = None if _MARK in text else _boxed(text)
    marked = text.rpartition(_MARK)[2] if boxed is None else boxed
    for pattern, replacement in _LATEX:
        marked = pattern.sub(replacement, marked)
    if boxed is not None and marked.count("=") == 1:
        marked = marked.partition("=")[2]
    numbers = _NUMBER.findall(marked)
    if len(numbers) > 1 and (boxed is not None or _is_expression(marked)):
        return "".join(marked.split()).casefold().rstrip(".")
    if numbers:
        return _value(numbers[0] if _MARK in text else numbers[-1])
    return " ".join(marked.split()).casefold().rstrip(".")


def _boxed(text: str) -> str | None:
    """Return the content of the last complete `\\boxed{}`, which may have braces; None without one."""
    content, opened = None, list[int]()
    for mark in _BRACES.finditer(text):
        if mark[0].endswith("{") and mark[0] != r"\{":
            # Braces that are no box begin nowhere.
            opened.append(mark.end() if len(mark[0]) > 1 else -1)
        elif mark[0] == "}" and opened:
            start = opened.pop()
            content = text[start : mark.start()] if start >= 0 else content
    return content


def _is_expression(text: str) -> bool:
    """Return whether a text is a mathematical expression alone: in brackets, or with LaTeX, without words."""
    bare = _COMMAND.sub("", text).strip()
    if re.search(r"[^\W\d_]|=", bare):
        return False
    return "\\" in text or (bare[:1] in ("(", "[", "{") and bare[-1:] in (")", "]", "}"))


def _value(number: str) -> str | float:
    numerator, _, denominator = number.replace(",", "").partition("/")
    if not denominator:
        return float(numerator)
    return float(numerator) / float(denominator) if float(denominator) else number


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
