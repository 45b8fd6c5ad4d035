"""Rows of each format, and what damaged ones must give, by the standard library alone."""

import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flytune.data.columns import NamedRow
from flytune.data.formats import CHATS, Tokens, choose, convert
from flytune.data.labels import encode, validated
from flytune.data.readers import read
from flytune.data.render import ChatTemplate, render
from flytune.errors import DataError
from flytune.recipe import Data

CALL = {"function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
GOOD: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {
            "messages": [
                {"role": "user", "content": f"ask {n} ön"},
                {"role": "assistant", "content": f"say {n} 日本"},
            ]
        }
        for n in range(10)
    ]
    + [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
            ]
        }
    ],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": f"ask {n}"}, {"from": "gpt", "value": f'say "{n}"\n'}]}
        for n in range(10)
    ],
    "instruction": [
        {"instruction": f"ask {n}", "input": "ön" * (n % 2), "output": f"say {n}"} for n in range(10)
    ],
    "prompt_completion": [{"prompt": f"ask {n}:", "completion": f" say, {n}"} for n in range(10)],
    "text": [{"text": f'The "fox" {n},\nand more'} for n in range(10)],
    "tokens": [{"input_ids": [5, 20 + n, 30], "labels": [-100, 20 + n, 30]} for n in range(10)],
}
DEEPEST = 100
"""Objects and lists inside each other that are read at most."""
FLAT = ("instruction", "prompt_completion", "text")


def sample_of(row: dict[str, Any], form: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    sample = convert(NamedRow(row, {}, "x:1"), choose(NamedRow(row, {}, "x:1"), form))
    if isinstance(sample, Tokens):
        return validated(sample, len(tokenizer), "x:1")
    template = ChatTemplate(tokenizer) if form in CHATS else None
    return next(encode([render(sample, template, True, "x:1")], tokenizer))


def outcomes(path: Path, form: str, tokenizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the place of each row with its sample or its DataError; nothing else may be raised."""
    try:
        for row, where in read(Data(path=str(path))):
            if isinstance(row, DataError):
                yield where, row
                continue
            try:
                yield where, sample_of(row, form, tokenizer)
            except DataError as error:
                yield where, error
    except DataError as error:
        yield "", error


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs) or any(
        "\ud800" <= letter <= "\udfff" for key, _ in pairs for letter in key
    ):
        raise ValueError(pairs)
    return dict(pairs)


def constant(name: str) -> float:
    raise ValueError(name)


def finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(text)
    return value


def depth(value: Any) -> int:
    """Return how many objects and lists of a JSON value are inside each other; an empty innermost one does
    not count."""
    deep, level = 0, [value]
    while level := [
        part
        for one in level
        if isinstance(one, dict | list)
        for part in (one.values() if isinstance(one, dict) else one)
    ]:
        deep += 1
    return deep


def expected_of_line(line: bytes, form: str, tokenizer: Any) -> Any:
    """Return what a line must give, by the standard library alone up to its row: sample, DataError, None for
    a blank one."""
    if not line.strip():
        return None
    try:
        row = json.loads(
            line.decode("utf-8-sig"), object_pairs_hook=unique, parse_constant=constant, parse_float=finite
        )
        return (
            sample_of(row, form, tokenizer) if isinstance(row, dict) and depth(row) <= DEEPEST else DataError
        )
    except (ValueError, RecursionError, DataError):
        return DataError


def plain_rows(content: bytes, kind: str) -> Iterator[Any]:
    """Yield the rows of a file of CSV or JSON as the standard library reads them, as far as it can."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text = content[: content.rfind(b"\n", 0, error.start) + 1].decode("utf-8-sig")
    if kind == "csv":
        yield from (row for row in csv.DictReader(io.StringIO(text, newline="")) if None not in row)
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = [json.loads(line) for line in text.split("\n") if is_json(line)]
    if isinstance(value, dict):
        value = next((item for item in value.values() if isinstance(item, list)), [])
    yield from (row for row in value if isinstance(row, dict))


def is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def fits(row: Any, form: str, tokenizer: Any) -> bool:
    try:
        sample_of(row, form, tokenizer)
    except DataError:
        return False
    return True
