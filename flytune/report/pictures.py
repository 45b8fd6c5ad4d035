"""Pictures of samples on a page: reduced, and inside the page itself."""

import base64
import io
from pathlib import Path
from typing import Any, NamedTuple

from flytune.data import shards
from flytune.models.images import COLUMN
from flytune.models.scoring import IGNORED
from flytune.sentences import counted

SIDE = 160
"""Largest width and height of a picture on a page, in pixels."""
MOST = 8
"""Pictures of a sample that are shown; the others are named."""


class Shown(NamedTuple):
    """A picture of a sample."""

    source: str
    """Address with the reduced picture in it; empty of those beyond MOST."""
    caption: str
    tokens: int
    """Tokens of the sample that stand for it."""


class Pictures:
    """The pictures of a prepared data set."""

    def __init__(self, dataset: Path) -> None:
        self._stored = shards.stored_images(dataset)

    @property
    def token_ids(self) -> frozenset[int]:
        """Return the tokens in whose places the model reads an image."""
        return self._stored.processor.token_ids

    def of_sample(self, digests: str) -> list[Shown]:
        """Return the pictures of a sample by their hashes (images.COLUMN), in order."""
        pictures = self._stored.pictures({COLUMN: digests})
        sizes = self._stored.processor.tokens_of(pictures)
        shown = []
        for number, (picture, tokens) in enumerate(zip(pictures, sizes, strict=True)):
            pixels = f"{picture.width:,} x {picture.height:,} pixels"
            caption = f"image {number + 1}: {pixels}, {counted(tokens, 'token')}"
            shown.append(Shown(reduced(picture) if number < MOST else "", caption, tokens))
        return shown

    def of_prompts(self, count: int, dataset: Path) -> list[list[Shown]]:
        """Return the pictures before the answer of each of the first `count` held-out samples."""
        pictures = []
        for row in shards.heldout_rows(dataset, count):
            start = next((place for place, label in enumerate(row["labels"]) if label != IGNORED), None)
            pictures.append(self.of_sample(self._stored.of_tokens(row, row["input_ids"][:start])[COLUMN]))
        return pictures


def reduced(picture: Any) -> str:
    """Return the address of a picture that is reduced to SIDE, with all of it in the address."""
    small = picture.copy()
    small.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
