"""Counts of the rows and samples of one source, collected chunk by chunk."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class Tally:
    """Counts of one source, or of some of its rows."""

    name: str
    weight: float = 1.0
    form: str = ""
    """Format of the rows; empty until the first row is read."""
    rows: int = 0
    """Rows read. This and the next counts, up to `duplicates`, count a row once, even where a weight repeats it."""
    bad: int = 0
    truncated: int = 0
    split: int = 0
    dropped_too_long: int = 0
    dropped_untrained: int = 0
    duplicates: int = 0
    """Samples dropped by data.deduplicate."""
    control_tokens: int = 0
    """Rows whose own text has control tokens."""
    samples: int = 0
    """Stored samples. This and the next three count repetitions by a weight."""
    tokens: int = 0
    trained_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    """Number of rows by their tokens before any cut."""

    def add(self, other: Self) -> None:
        """Add the counts of more rows of the same source."""
        self.form = self.form or other.form
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lengths.update(other.lengths)

    def keep(self, tokens: int, trained_tokens: int) -> None:
        """Count one more stored sample."""
        self.samples += 1
        self.tokens += tokens
        self.trained_tokens += trained_tokens


_COUNTS = ("rows", "bad", "truncated", "split", "dropped_too_long", "dropped_untrained", "duplicates", "control_tokens",
           "samples", "tokens", "trained_tokens")  # fmt: skip


def total(tallies: list[Tally], what: str) -> int:
    """Return the sum of one count."""
    return sum(getattr(tally, what) for tally in tallies)


def to_json(tally: Tally) -> dict[str, Any]:
    """Return the tally as JSON values."""
    return {**vars(tally), "lengths": sorted(tally.lengths.items())}


def from_json(content: dict[str, Any]) -> Tally:
    """Return the tally that `to_json` was given."""
    return Tally(**{**content, "lengths": Counter(dict(content["lengths"]))})
