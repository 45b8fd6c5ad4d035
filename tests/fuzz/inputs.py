"""Inputs by number: drawn by hypothesis from a seed, so that each is drawn again by its kind, seed, chunk and
number."""

import hashlib
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import FlakyStrategyDefinition

from tests.fuzz import (
    artifacts,
    commands,
    contents,
    conversions,
    decisions,
    free_form,
    isolation,
    judges,
    pictures,
    places,
    plans,
    prepared,
    runs,
    saved,
    served,
)
from tests.fuzz.isolation import Outcome, content_of, names_of
from tests.fuzz.kinds import KINDS, Samples

# By their import.
_REGISTERED = (
    artifacts,
    commands,
    contents,
    conversions,
    decisions,
    free_form,
    judges,
    pictures,
    places,
    plans,
    prepared,
    runs,
    saved,
    served,
)
CHUNK = 25
"""Inputs that are drawn together."""


@dataclass(frozen=True, slots=True)
class Result:
    """An input's end, and the command that runs it again."""

    kind: str
    seed: int
    chunk: int
    number: int
    outcome: Outcome
    given: str

    @property
    def command(self) -> str:
        return (
            f"python -m tests.fuzz --kinds {self.kind} --seed {self.seed} --only {self.chunk}:{self.number}"
        )


def drawn(name: str, seed: int, chunk: int, samples: Samples, count: int = CHUNK) -> list[Any]:
    """Return the inputs of a chunk."""
    found: list[Any] = []
    digest = hashlib.sha256(f"{name} {seed} {chunk}".encode()).digest()

    @hypothesis.seed(int.from_bytes(digest[:8], "big"))
    @settings(
        max_examples=CHUNK,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(KINDS[name].draw(samples))
    def collect(one: Any) -> None:
        found.append(one)

    before = random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(FlakyStrategyDefinition):  # a document of great depth: the table counts fewer inputs
            collect()
    random.setstate(before)
    return found[:count]


def run(
    name: str,
    seed: int,
    chunk: int,
    samples: Samples,
    only: int | None = None,
    count: int = CHUNK,
    before: Callable[[], object] = lambda: None,
) -> Iterator[Result]:
    """Run a chunk's inputs one by one, each in a process and a folder of its own; nothing else may be
    changed.

    `before` is called in the input's process, before its check.
    """

    def work(one: Any, folder: Path) -> None:
        before()
        KINDS[name].check(samples, one, folder)

    sealed, names = content_of(samples.folder), names_of(samples.folder)
    for number, one in enumerate(drawn(name, seed, chunk, samples, count)):
        if only is not None and number != only:
            continue
        folder = Path(tempfile.mkdtemp(prefix="input-", dir=samples.folder.parent))
        try:
            outcome = isolation.run(partial(work, one, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if names_of(samples.folder) != names or (
            number % CHUNK == 0 and content_of(samples.folder) != sealed
        ):
            outcome = replace(
                outcome, verdict="failure", text="files outside of the input's folder were changed"
            )
        yield Result(name, seed, chunk, number, outcome, f"{one!r:.600}")
