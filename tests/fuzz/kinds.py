"""Kinds of inputs: a strategy that draws one, and the check that uses it as Flytune does."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.support import tiny
from tests.support.chats import CHATML_CALLING, tokenizer_folder
from tests.support.spoiled import RELEASE

__all__ = ["KINDS", "RELEASE", "Kind", "Samples", "kind"]
Check = Callable[[Any, Path], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of input."""

    name: str
    draw: Callable[["Samples"], st.SearchStrategy[Any]]
    """Function from the valid samples to the strategy of inputs."""
    check: Callable[["Samples", Any, Path], None]
    """Function that uses an input, in a folder of its own, which is the only one that it may change."""
    share: float
    """Number of inputs, of those that a kind has on average; less for kinds whose inputs take longer."""


KINDS: dict[str, Kind] = {}


def kind(
    name: str, draw: Callable[["Samples"], st.SearchStrategy[Any]], share: float = 1.0
) -> Callable[[Any], Any]:
    """Register the check of a kind, with its strategy and its share of the inputs."""

    def register(check: Any) -> Any:
        KINDS[name] = Kind(name, draw, check, share)
        return check

    return register


class Samples:
    """Valid documents that are mutated, in a folder that no check may change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.base = tiny.tiny_base(folder)
        self.rows = tiny.write_pairs(folder / "rows.jsonl", 20)
        self.tokenizer = tokenizer_folder(folder / "tokenizer", CHATML_CALLING)
        (folder / "sentinel").mkdir()
        (folder / "sentinel" / "keep.txt").write_text("keep", encoding="utf-8")
        (folder / "sentinel" / "own.html").write_text("", encoding="utf-8")

    def recipe(self, **changes: Any) -> dict[str, Any]:
        """Return a valid recipe, with dotted changes."""
        return tiny.tiny_recipe(self.base, self.rows, changes)

    def config(self) -> dict[str, Any]:
        """Return the base model's config.json."""
        content: dict[str, Any] = json.loads((self.base / "config.json").read_bytes())
        return content
