"""Queries with documents: a query, a document that belongs to it, and documents that do not.

The columns are `query` (or `anchor`), `positive`, and `negatives`: a list of texts, or one; or `negative_1`,
`negative_2` ..., as sentence-transformers' mining of hard negatives writes them. A stored row has the tokens
of the query, the positive and as many negatives as objective.negatives says, and their lengths (seq_lengths).
Each text ends with the end token, also one that is cut: its vector is taken there.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from flytune import limits
from flytune.data.columns import NamedRow
from flytune.data.formats import Plain
from flytune.data.labels import Encoded, cut_before_end
from flytune.data.messages import text_of
from flytune.data.rows.base import Content, UnpredictedRows
from flytune.errors import DataError
from flytune.recipe import Data, DataRequest
from flytune.row_names import QUERIES
from flytune.sentences import counted

FORM = "queries"
"""Format of such rows in manifests."""
QUERY, POSITIVE, NEGATIVES = "query", "positive", "negatives"
_NUMBERED = re.compile(r"negative_(\d+)")


class Queries(UnpredictedRows):
    """A stored row has all sequences, none of whose tokens is predicted; `seq_lengths` are their lengths."""

    name = QUERIES
    meaning = "queries with documents"
    title = "Query"
    columns: ClassVar[Mapping[str, str]] = {"seq_lengths": "list"}
    ends_texts = True

    def __init__(self, negatives: int = 0, prompts: Sequence[str] = ()) -> None:
        """Bind it to the number of negatives of a row, and to the texts before queries and documents."""
        self._negatives = negatives
        self._query_prompt, self._document_prompt = prompts or ("", "")
        self.sequence_names = (QUERY, POSITIVE, *(f"negative {place + 1}" for place in range(negatives)))

    def bound(self, request: DataRequest) -> Self:
        return type(self)(request.negatives, request.text_prompts)

    def with_negatives(self, negatives: int) -> Self:
        return type(self)(negatives)

    def form(self, row: NamedRow) -> str:
        return FORM

    def content(self, row: NamedRow, form: str, system_prompt: str | None) -> Content:
        row, where = row.with_aliases(), row.where
        query, positive = (_text(row.require(name), row.name(name), where) for name in (QUERY, POSITIVE))
        negatives = negatives_of(row)
        if len(negatives) < self._negatives:
            raise DataError(
                f"{where}: has {counted(len(negatives), 'negative')}, and objective.negatives is "
                f"{self._negatives}; lower it, or remove the row"
            )
        negatives = negatives[: self._negatives]
        if positive in negatives:
            raise DataError(
                f"{where}: negatives[{negatives.index(positive)}] is the positive too; remove it there"
            )
        documents = [Plain(self._document_prompt + text, "") for text in (positive, *negatives)]
        return Content([Plain(self._query_prompt + query, ""), *documents], query)

    def cut(self, sequences: Sequence[Encoded], data: Data) -> list[list[Encoded]]:
        cut = [cut_before_end(ids, labels, data.max_length) for ids, labels in sequences]
        return [] if data.too_long == "drop" else [cut]

    def is_trained(self, sequences: Sequence[Encoded]) -> bool:
        return all(ids for ids, _ in sequences)

    def unread(self, row: NamedRow) -> NamedRow:
        negatives = (NEGATIVES, *filter(_NUMBERED.fullmatch, row.values)) if self._negatives else ()
        return row.with_aliases().without(QUERY, POSITIVE, *negatives)


def are_in(row: Mapping[str, Any]) -> bool:
    """Return whether a row's columns show a query and its document."""
    return POSITIVE in row and bool({QUERY, "anchor"} & row.keys())


def fields_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of objective embed that rows show: the number of negatives that each has."""
    columns = NamedRow(dict(rows[0]), {}, "").with_aliases().columns
    fewest = min(len(negatives_of(NamedRow(dict(row), columns, "a row"))) for row in rows)
    return {"negatives": min(fewest, limits.NEGATIVES)} if fewest else {}


def negatives_of(row: NamedRow) -> list[str]:
    """Return a row's documents that do not belong to its query, in order; empty if it has none.

    Raises:
        DataError: one is no text, or empty.
    """
    theirs, value = row.name(NEGATIVES), row.get(NEGATIVES)
    if value is None:
        names = sorted(filter(_NUMBERED.fullmatch, row.values), key=lambda name: int(name.rpartition("_")[2]))
        return [_text(row.values[name], name, row.where) for name in names if row.values[name] is not None]
    if isinstance(value, list | tuple):
        return [_text(text, f"{theirs}[{place}]", row.where) for place, text in enumerate(value)]
    return [_text(value, theirs, row.where)]


def _text(value: Any, name: str, where: str) -> str:
    text = text_of(value, name, where)
    if not text.strip():
        raise DataError(f"{where}: {name} is empty; remove the row, or that text")
    return text
