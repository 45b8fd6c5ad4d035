"""Counts of the rows and samples of one source, collected chunk by chunk; and examples of those that were cut
or dropped, kept for the x-ray with their tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from flytune.data.labels import Encoded
from flytune.data.left_out import MOST_NAMES, OTHERS
from flytune.models.scoring import IGNORED
from flytune.recipe import Data
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
        TokenWindow(start=low, ids=[int(token) for token in ids[low:high]], trained=trained[low:high])
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


def write_examples(examples: Sequence[Example], max_length: int, folder: Path) -> None:
    """Write examples.json of prepared data, if there are any."""
    if examples:
        Examples(max_length=max_length, examples=first_of_each(examples)).write(folder / EXAMPLES)


def read_examples(folder: Path) -> list[Example]:
    """Return the examples of prepared data; none for data that an earlier version has prepared."""
    return Examples.read(folder / EXAMPLES).examples if (folder / EXAMPLES).is_file() else []


@dataclass
class Tally:
    """Counts of one source, or of some of its rows."""

    name: str
    weight: float = 1.0
    form: str = ""
    """Format of the rows; empty until the first row is read."""
    kind: str = ""
    """`text` or `messages`, of answers to compare; empty until the first row is read, and for other rows."""
    rows: int = 0
    """Rows read. This and the next counts, up to `duplicates`, count a row once, even where a weight repeats
    it."""
    bad: int = 0
    truncated: int = 0
    split: int = 0
    dropped_too_long: int = 0
    dropped_untrained: int = 0
    duplicates: int = 0
    """Samples dropped by data.deduplicate."""
    control_tokens: int = 0
    """Rows whose own text has control tokens."""
    missing: int = 0
    """Rows of which a text is a word for a missing value (missing_values.py)."""
    first_missing: str = ""
    """Location of the first of them, and the word; empty if there is none."""
    contradicted: int = 0
    """Pairs whose own figures (scores, a margin) say that the rejected answer is the better one."""
    tokens_read: int = 0
    """Tokens of all rows before any cut, of both answers of a pair. Neither this nor the next two count
    repetitions."""
    truncated_tokens: int = 0
    """Tokens that were cut off."""
    dropped_tokens: int = 0
    """Tokens of dropped rows."""
    samples: int = 0
    """Stored samples. This and the next three count repetitions by a weight."""
    tokens: int = 0
    trained_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    """Number of rows by their tokens before any cut."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of rows by the column, or key of messages, that has content and is in no sample
    (left_out.py)."""
    thoughts: Counter[str] = field(default_factory=Counter)
    """Numbers of thoughts of answers by what became of them (ThoughtCounts)."""
    notes: Counter[str] = field(default_factory=Counter)
    """Number of stored rows by what is noted of them (RowKind.notes); repetitions by a weight are not
    counted."""
    named: Counter[str] = field(default_factory=Counter)
    """Number of rows that have a column of data.columns, by our name of it, and of rows of each shape
    (unused_settings)."""
    split_range: list[int] = field(default_factory=list)
    """The smallest and the largest number by which a stored row was put into a split (Sampler); empty without
    one."""
    examples: list[Example] = field(default_factory=list)
    """The first rows that were cut or dropped (examples.py)."""

    def add(self, other: Self) -> None:
        """Add the counts of more rows of the same source."""
        self.form, self.kind = self.form or other.form, self.kind or other.kind
        self.first_missing = self.first_missing or other.first_missing
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lengths.update(other.lengths)
        self.thoughts.update(other.thoughts)
        self.notes.update(other.notes)
        self.named.update(other.named)
        for name, rows in other.left_out.items():
            self.left_out[name if name in self.left_out or len(self.left_out) < MOST_NAMES else OTHERS] += (
                rows
            )
        self.split_range = ends_of([*self.split_range, *other.split_range])
        self.examples = first_of_each([*self.examples, *other.examples])

    def keep(self, tokens: int, trained_tokens: int) -> None:
        """Count one more stored sample."""
        self.samples += 1
        self.tokens += tokens
        self.trained_tokens += trained_tokens


def ends_of(numbers: Sequence[int]) -> list[int]:
    """Return the smallest and the largest of some numbers; empty if there are none."""
    return [min(numbers), max(numbers)] if numbers else []


COUNTS = [count.name for count in fields(Tally) if count.type is int]
"""Names of the counts of a source that are sums."""


def count_tokens(
    tally: Tally, whole: Sequence[Encoded], kept: Sequence[tuple[Any, Any]], where: str, data: Data
) -> None:
    """Count the tokens of a row that are stored and those that are not, and keep an example of a row that
    lost some.

    `whole` are its sequences before any cut, `kept` those that are stored; `where` is the location of the
    row.
    """
    read = sum(len(ids) for ids, _ in whole)
    # A piece of a long sample begins with the last token of the one before it.
    stored = min(read, sum(len(ids) for ids, _ in kept))
    tally.tokens_read += read
    if stored == read:
        return
    if stored:
        tally.truncated_tokens += read - stored
        kind: Kind = "cut"
    else:
        tally.dropped_tokens += read
        is_long = data.too_long == "drop" and max(len(ids) for ids, _ in whole) > data.max_length
        kind = "dropped, too long" if is_long else "dropped, without an answer"
    if sum(example.kind == kind for example in tally.examples) < MOST:
        tally.examples.append(example_of(kind, where, whole, data.max_length))


def total(tallies: list[Tally], what: str) -> int:
    """Return the sum of one count."""
    return sum(getattr(tally, what) for tally in tallies)
