"""JSON from outside: bounded in size and depth, without duplicate keys, and without numbers that are not
finite."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

LARGEST = 100_000_000
"""Bytes of a text that is read by default."""
DEEPEST = 100
"""Largest number of objects and lists inside each other."""
_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:]', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JSONError(ValueError):
    """A text that is not JSON, or is refused."""

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        at = f" at column {column}" if line else ""
        if line > 1:
            at = f" at line {line} column {column}"
        super().__init__(message + at)
        self.message, self.line, self.column = message, line, column
        """The message without its place; and the place, from 1 on, or 0 where there is none."""


class _DuplicateKeyError(ValueError):
    pass


def load(content: str | bytes, largest: int = LARGEST) -> Any:
    """Return the value of a JSON text, in UTF-8 if it is bytes.

    Raises:
        JSONError: it is not JSON; is longer than `largest` bytes (characters of a str) or nested deeper than
            DEEPEST; has a duplicate key, NaN, an infinity, or half of a surrogate pair in a key.
    """
    if len(content) > largest:
        raise JSONError(f"{len(content):,} bytes, more than the {largest:,} that are read")
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        value = _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise JSONError(f"not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}") from None
    except json.JSONDecodeError as error:
        raise JSONError(error.msg, error.lineno, error.colno) from None
    except _DuplicateKeyError:
        raise JSONError(_describe_duplicate(text)) from None
    except RecursionError:
        raise JSONError(_TOO_DEEP) from None
    except ValueError as error:
        raise JSONError(
            "an integer of thousands of digits" if "integer string" in str(error) else str(error)
        ) from None
    if text.count("[") + text.count("{") > DEEPEST and is_deep(value):
        raise JSONError(_TOO_DEEP)
    if _SURROGATE.search(text) and any(
        any("\ud800" <= letter <= "\udfff" for letter in key) for key in _keys(value)
    ):
        raise JSONError("a key has half of a surrogate pair, which is not a character")
    return value


def load_object(content: str | bytes, largest: int = LARGEST) -> dict[str, Any]:
    """Return the object of a JSON text, as `load` reads it.

    Raises:
        JSONError: as `load`; or it is not an object.
    """
    value = load(content, largest)
    if not isinstance(value, dict):
        raise JSONError(f"must be a JSON object, found {value!r:.60}")
    return value


_TOO_DEEP = f"objects and lists are nested deeper than {DEEPEST}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise _DuplicateKeyError
    return content


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is too large for a number")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON; numbers are finite")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant)


def is_deep(value: Any) -> bool:
    """Return whether mappings and lists are inside each other more often than DEEPEST."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [part for container in level for _, part in entries(container)]
        if not level:
            return False
    return True


def entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys, or places, and the parts of a mapping or a list; nothing of other values."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for _, part in entries(value):
        yield from _keys(part)


def _describe_duplicate(text: str) -> str:
    """Name the first key that an object has twice, with both places."""
    stack: list[dict[str, int] | None] = []
    last = next(_TOKENS.finditer(text))
    for token in _TOKENS.finditer(text):
        if token[0] in ("{", "["):
            stack.append({} if token[0] == "{" else None)
        elif token[0] in ("}", "]"):
            stack.pop()
        elif token[0] == ":":
            names, key = stack[-1], json.loads(last[0])
            if names is not None and key in names:
                places = [
                    (text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at))
                    for at in (names[key], last.start())
                ]
                (first, _), (second, _) = places
                same = f"columns {places[0][1]} and {places[1][1]}" + (
                    f" of line {first}" if first > 1 else ""
                )
                where = same if first == second else f"lines {first} and {second}"
                return f"the key {key!r:.60} is there twice, in {where}; keep one"
            if names is not None:
                names[key] = last.start()
        else:
            last = token
    raise AssertionError("the decoder has found a duplicate key")
