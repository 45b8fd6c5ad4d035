"""Answers to train: each sample is a chat, a prompt with its completion, a text, or tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

from flytune.data.columns import NamedRow
from flytune.data.formats import choose, convert
from flytune.data.labels import Encoded
from flytune.data.rows.base import Content, RowKind
from flytune.models.scoring import IGNORED
from flytune.recipe import Data, Source
from flytune.row_names import ANSWERS


class TrainedAnswers(RowKind):
    """Samples of every format but those of preferences."""

    name = ANSWERS
    meaning = "answers to train"

    def form(self, row: dict[str, Any], source: Source, where: str) -> str:
        return choose(NamedRow.of(row, source, where), source.format)

    def content(
        self, row: dict[str, Any], form: str, source: Source, where: str, system_prompt: str | None
    ) -> Content:
        return Content([convert(NamedRow.of(row, source, where), form, system_prompt)])

    def cut(self, sequences: Sequence[Encoded], data: Data) -> list[list[Encoded]]:
        if data.too_long == "split":
            return [[piece] for piece in split(sequences[0], data.max_length)]
        return super().cut(sequences, data)


def split(sample: Encoded, max_length: int) -> Iterator[Encoded]:
    """Yield consecutive pieces of at most max_length tokens.

    A piece ends after the last answer that ends in it. If none does (plain text, or an answer longer than
    max_length), it is full, and its last token is repeated as the first of the next piece, as context: the
    first token of a piece is never trained, because no token precedes it that could predict it. So each
    trained token is trained once.
    """
    ids, labels = sample
    start = 0
    while len(ids) - start > max(max_length, 1):
        end = start + max_length
        boundary = next((at for at in range(end, start, -1) if labels[at] == IGNORED != labels[at - 1]), None)
        yield _piece(sample, start, boundary or end)
        start = boundary or max(end - 1, start + 1)
    yield _piece(sample, start, len(ids))


def _piece(sample: Encoded, start: int, end: int) -> Encoded:
    return sample[0][start:end], [IGNORED, *sample[1][start + 1 : end]]
