"""Texts that a classifier labels, read and cut as in its training; no torch."""

from typing import Any

from flytune.data.process import Chunk, Sampler
from flytune.data.rows.classified import Classified
from flytune.data.tokenizer import Encoder
from flytune.models import heads
from flytune.recipe import DataRequest, Recipe


class Texts:
    """Reader of the texts of rows, as the preparation of a classifier's data reads them."""

    def __init__(self, recipe: Recipe, tokenizer: Any = None) -> None:
        """Make the reader of a recipe's data; without a tokenizer it only checks columns."""
        request = DataRequest.of(recipe, "")
        self._sampler = Sampler(request, tokenizer and Encoder(tokenizer))
        self._kind = Classified().bound(request)
        self._key, self._source = next(iter(recipe.data.all_sources.items()))

    def tokens(self, row: dict[str, Any], where: str) -> list[int]:
        """Return the tokens of a row's text; none without a tokenizer.

        Raises:
            DataError: it has no text, or one that is longer than data.max_length where such rows were left
                out of training.
        """
        labelled = self._kind.with_some_label(row, self._source)
        samples = self._sampler.samples(Chunk(self._key, [(labelled, where)], "", "", 1.0, False))
        for _, error in samples.bad:
            raise error
        return [token for row in samples.rows for sample in row for token in sample.ids.tolist()]


def is_classifier(recipe: Recipe) -> bool:
    """Return whether a recipe's model answers with probabilities of labels."""
    return heads.head_of(recipe).answers_in == heads.PROBABILITIES
