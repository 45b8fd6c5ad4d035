"""Answers to train, in chats that may have images."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from flytune.data.check import Check, judged
from flytune.data.formats import Chat, Sample
from flytune.data.image_rows import PIXELS, READ, TOKENS
from flytune.data.labels import Encoded
from flytune.data.rows.answers import TrainedAnswers
from flytune.data.rows.base import Label
from flytune.models.chat_templates import IMAGE
from flytune.models.images import COLUMN
from flytune.recipe import Data, DataRequest
from flytune.records import Manifest
from flytune.row_names import IMAGE_ANSWERS
from flytune.sentences import counted, counted_of

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
