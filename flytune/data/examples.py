"""Rows that were cut or dropped, kept for the x-ray: the first of each kind, with their tokens."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from flytune.data.labels import Encoded
from flytune.models.scoring import IGNORED
from flytune.schema import Record, Strict

EXAMPLES = "examples.json"
MOST = 3
"""Number of rows of each kind that are kept."""
_HEAD, _AROUND = 240, 120
"""Numbers of tokens that are kept at the beginning, and on each side of the place of the cut, or at the
end."""
Kind = Literal["dropped, too long", "dropped, without an answer", "cut"]


class TokenWindow(Strict):
    """Tokens of a sequence that follow one another."""

    start: int
    ids: list[int]
    trained: list[bool]


class Excerpt(Strict):
    """A sequence before it was cut or dropped, without its middle if it is long."""

    tokens: int
    trained_tokens: int
    windows: list[TokenWindow]


class Example(Strict):
    """A row that was cut or dropped."""

    kind: Kind
    where: str
    """Location of the row: `train.jsonl:12`."""
    sequences: list[Excerpt]
    """One, or the chosen and the rejected one of a pair."""


class Examples(Record):
    """examples.json, beside the manifest; it is not written where no row was cut or dropped."""

    max_length: int
    examples: list[Example] = Field(min_length=1)


def example_of(kind: Kind, where: str, sequences: Sequence[Encoded], max_length: int) -> Example:
    """Return a row's example; `sequences` are complete, and cut at `max_length`."""
    return Example(
        kind=kind, where=where, sequences=[_excerpt(ids, labels, max_length) for ids, labels in sequences]
    )


def _excerpt(ids: list[int], labels: list[int], max_length: int) -> Excerpt:
    length = len(ids)
    place = max_length if length > max_length else length
    ranges = [(0, min(_HEAD, length))]
    for start, end in ((place - _AROUND, place + _AROUND), (length - _AROUND, length)):
        start, end = max(start, 0), min(end, length)
        if start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((start, end))
    trained = [False, *(label != IGNORED for label in labels[1:])]
    windows = [
        TokenWindow(start=low, ids=[int(one) for one in ids[low:high]], trained=trained[low:high])
        for low, high in ranges
    ]
    return Excerpt(tokens=length, trained_tokens=sum(trained), windows=windows)


def first_of_each(examples: Sequence[Example]) -> list[Example]:
    """Return the first MOST examples of each kind."""
    seen, kept = Counter[str](), []
    for example in examples:
        seen[example.kind] += 1
        kept += [example] if seen[example.kind] <= MOST else []
    return kept


def write(examples: Sequence[Example], max_length: int, folder: Path) -> None:
    """Write examples.json of prepared data, if there are any."""
    if examples:
        Examples(max_length=max_length, examples=first_of_each(examples)).write(folder / EXAMPLES)


def read(folder: Path) -> list[Example]:
    """Return the examples of prepared data; none for data that an earlier version has prepared."""
    return Examples.read(folder / EXAMPLES).examples if (folder / EXAMPLES).is_file() else []
