"""What happened to the rows of one source, counted chunk by chunk."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class Tally:
    """Counts of one source, or of some of its rows."""

    name: str
    weight: float = 1.0
    form: str = ""
    """The format of its rows; empty until one was read."""
    rows: int = 0
    """Each once, however often a weight repeats it; so are the next five."""
    bad: int = 0
    truncated: int = 0
    split: int = 0
    dropped_too_long: int = 0
    dropped_untrained: int = 0
    duplicates: int = 0
    """Samples left out by data.deduplicate."""
    samples: int = 0
    """Kept, as often as they are; so are the next two."""
    tokens: int = 0
    trained_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    """Tokens of a row before any cut, to rows of that length, as often as they come."""

    def add(self, other: Self) -> None:
        """Counts of further rows of the same source."""
        self.form = self.form or other.form
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lengths.update(other.lengths)

    def keep(self, tokens: int, trained_tokens: int) -> None:
        """One more sample that is stored."""
        self.samples += 1
        self.tokens += tokens
        self.trained_tokens += trained_tokens


_COUNTS = ("rows", "bad", "truncated", "split", "dropped_too_long", "dropped_untrained", "duplicates",
           "samples", "tokens", "trained_tokens")  # fmt: skip


def total(tallies: list[Tally], what: str) -> int:
    """The sum of one count."""
    return sum(getattr(tally, what) for tally in tallies)


def dumped(tally: Tally) -> dict[str, Any]:
    """As JSON takes it."""
    return {**vars(tally), "lengths": sorted(tally.lengths.items())}


def loaded(content: dict[str, Any]) -> Tally:
    """What `dumped` gave."""
    return Tally(**{**content, "lengths": Counter(dict(content["lengths"]))})
