"""Answers to train: each sample is a chat, which may have images, a prompt with its completion, a text, or
tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from flytune.data.check import Check, judged
from flytune.data.columns import NamedRow
from flytune.data.formats import Chat, Sample, choose, convert
from flytune.data.image_rows import PIXELS, READ, TOKENS
from flytune.data.labels import Encoded
from flytune.data.rows.base import Content, Label, RowKind
from flytune.models.chat_templates import IMAGE
from flytune.models.images import COLUMN
from flytune.models.scoring import IGNORED
from flytune.recipe import Data, DataRequest
from flytune.records import Manifest
from flytune.row_names import ANSWERS, IMAGE_ANSWERS
from flytune.sentences import counted, counted_of


class TrainedAnswers(RowKind):
    """Samples of every format but those of preferences."""

    name = ANSWERS
    meaning = "answers to train"

    def form(self, row: NamedRow) -> str:
        return choose(row, row.format)

    def content(self, row: NamedRow, form: str, system_prompt: str | None) -> Content:
        return Content([convert(row, form, system_prompt)])

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


IMAGES, WITHOUT_IMAGES = "images", "samples without images"
"""Names of notes in a manifest: the number of images, and of samples that have none."""


class ImageAnswers(TrainedAnswers):
    """Samples of the formats of chats; one that is too long is left out, because an image has no half."""

    name = IMAGE_ANSWERS
    meaning = "answers to train, about images"
    columns: ClassVar[Mapping[str, str]] = {COLUMN: "text"}
    cuts = "drop"
    has_images = True

    def cut(self, sequences: Sequence[Encoded], data: Data) -> list[list[Encoded]]:
        return []

    def notes(
        self, sequences: Sequence[Encoded], samples: Sequence[Sample], request: DataRequest
    ) -> Iterator[str]:
        messages = samples[0].messages if isinstance(samples[0], Chat) else []
        images = sum(message["content"].count(IMAGE) for message in messages)
        yield from [IMAGES] * images
        if not images:
            yield WITHOUT_IMAGES

    def checks(self, manifest: Manifest) -> Iterator[Check]:
        rows = manifest.train.samples + manifest.heldout.samples
        without = manifest.notes.get(WITHOUT_IMAGES, 0)
        read = manifest.notes.get(READ, 0)
        means = [round(manifest.notes.get(name, 0) / max(read, 1)) for name in (PIXELS, TOKENS)]
        yield judged(
            "images",
            without,
            rows,
            f"{counted(manifest.notes.get(IMAGES, 0), 'image')}, of {counted(means[0], 'pixel')} and "
            f"{counted(means[1], 'token')} on average; "
            f"{counted_of(without, rows, 'sample', 'has', 'have')} none",
            "only warns if all have none",
            is_fine=without < rows,
            advice="data.images: true is for rows with images: look at the names of their columns "
            "(data.columns: {images: ...})",
        )

    def values(self, lengths: list[int], label: Label, fields: str) -> tuple[Any, ...]:
        return (fields,)
