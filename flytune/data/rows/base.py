"""The interface of a kind of rows: what a row of a source must have, what is stored of it, and how it is
checked and shown."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from flytune.data import left_out, row_forms
from flytune.data.check import Check
from flytune.data.columns import NamedRow
from flytune.data.formats import CHATS, Chat, Sample
from flytune.data.labels import Encoded
from flytune.models.scoring import IGNORED, Row
from flytune.recipe import Data, DataRequest, Source
from flytune.records import Manifest

Label = bool | tuple[int, ...] | None
"""Label of a row: desirable or not, or the places of its labels; None where there are no labels."""


class Content(NamedTuple):
    """The content of a row of a source."""

    samples: list[Sample]
    """Complete samples: of a kind with several sequences in a stored row, those of one stored row after the
    other."""
    prompt: str = ""
    """Identity of the prompt: rows of equal prompts are always in the same split. Empty: equal samples
    are."""
    labels: Sequence[Label] = (None,)
    """Label of each stored row."""
    fields: str = ""
    """JSON of what is stored beside the tokens; empty of kinds that store none."""


class RowKind:
    """One kind of rows that objectives train on. Subclasses contain only what differs."""

    name: ClassVar[str]
    """Name in records."""
    meaning: ClassVar[str]
    """Noun of its rows, in the plural."""
    title: ClassVar[str] = "Sample"
    """Title of one row that is shown."""
    sequence_names: tuple[str, ...] = ("",)
    """Name of each sequence of a stored row, which follow one another in it."""
    columns: ClassVar[Mapping[str, str]] = {}
    """Stored columns beside input_ids and labels: `list` of int32, `int` for one int32, or `text`."""
    label_names: ClassVar[Mapping[bool, str]] = {}
    """Meaning of the stored label of a row."""
    cuts: ClassVar[str] = "truncate, split or drop"
    """Values of data.too_long that let long rows pass."""
    keeps_columns: ClassVar[bool] = False
    """True if all columns of a row are stored, so that none is left out."""
    own_columns: ClassVar[tuple[str, ...]] = ()
    """Columns that it reads beside those of the format, which are not left out."""
    trains_labels: ClassVar[bool] = True
    """True if what has labels is what is trained, so that each stored row has some."""
    ends_texts: ClassVar[bool] = False
    """True if each text ends with the end token wherever it is tokenized: the stored tokenizer adds it."""
    has_images: ClassVar[bool] = False
    """True if its rows may have images."""
    contradiction: ClassVar[str] = ""
    """Contradiction of two rows, as a verb and its object; empty where there is none."""

    def bound(self, request: DataRequest) -> Self:
        """Return the kind with what a request says of its rows."""
        return self

    def with_end(self, token: int | None) -> Self:
        """Return the kind with the end token that the tokenizer adds to a text; None if it adds none."""
        return self

    def with_negatives(self, negatives: int) -> Self:
        """Return the kind with so many negatives in each row, where it has some."""
        return self

    @property
    def sequences(self) -> int:
        """Number of sequences of a stored row, which one row brings into a forward pass."""
        return len(self.sequence_names)

    def known(self, row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
        """Return a row of another tool in the form that this kind reads; others as they are."""
        return row

    def form(self, row: NamedRow) -> str:
        """Return the format that a row is read as.

        Raises:
            DataError: the row has no such format.
        """
        raise NotImplementedError

    def content(self, row: NamedRow, form: str, system_prompt: str | None) -> Content:
        """Return the content of a row, which `form` has named.

        Raises:
            DataError: a column is missing, or its content does not fit.
        """
        raise NotImplementedError

    def variant(self, samples: Sequence[Sample]) -> str:
        """Return `messages` or `text` where the format does not tell them apart, and all rows of a source
        must be alike."""
        return ""

    def rows_of(self, first: Mapping[str, Any], source: Source) -> int:
        """Return the stored rows that a row of a source makes; `first` is its first row, empty if that is not
        known."""
        return 1

    def unread(self, row: NamedRow) -> NamedRow:
        """Return a row without the columns that it reads beside those of the format."""
        return row.without(*self.own_columns)

    def contradicts_itself(self, row: dict[str, Any]) -> bool:
        """Return whether a row's own figures say that another answer is the better one."""
        return False

    def cut(self, sequences: Sequence[Encoded], data: Data) -> list[list[Encoded]]:
        """Return the sequences of a row, of which one is longer than max_length, as stored rows; none if it
        is dropped."""
        if data.too_long == "drop":
            return []
        return [[(ids[: data.max_length], labels[: data.max_length]) for ids, labels in sequences]]

    def is_long(self, sequences: Sequence[Encoded], max_length: int) -> bool:
        """Return whether a row is longer than what may be stored."""
        return max(len(ids) for ids, _ in sequences) > max_length

    def aligned(self, sequences: list[Encoded], samples: Sequence[Sample]) -> list[Encoded]:
        """Return the sequences that were made of a row's samples, with answers that are compared begun at the
        same token."""
        return sequences

    def notes(
        self, sequences: Sequence[Encoded], samples: Sequence[Sample], request: DataRequest
    ) -> Iterator[str]:
        """Yield the names of the counts of the contract in which a stored row, made of `samples`, is
        counted."""
        yield from ()

    def is_trained(self, sequences: Sequence[Encoded]) -> bool:
        """Return whether there is something to learn in a stored row."""
        return all(labels.count(IGNORED) < len(labels) for _, labels in sequences)

    def scored(self, rows: Sequence[Row]) -> list[Row]:
        """Return those of stored rows that have something to score."""
        if not self.trains_labels:
            return list(rows)
        return [row for row in rows if any(label != IGNORED for label in row["labels"][1:])]

    def values(self, lengths: list[int], label: Label, fields: str) -> tuple[Any, ...]:
        """Return the values of `columns` of a stored row with sequences of these lengths; `fields` are its
        content's."""
        return (lengths,) if "seq_lengths" in self.columns else ()

    def sides(self, part: Any) -> tuple[Any, Any] | None:
        """Return a hash (uint64) of each row of StoredSamples, and a bool: rows of one hash and other bools
        contradict each other. None where rows cannot."""
        return None

    def has_template(self, formats: set[str], tokenizer: Any) -> bool:
        """Return whether rows of these formats are rendered with the chat template."""
        return bool(formats & set(CHATS))

    def checks(self, manifest: Manifest) -> Iterator[Check]:
        """Yield its own checks of the data contract."""
        yield from ()

    def longest(self, dataset: Any) -> Any:
        """Return the length of the longest sequence of each row of a `datasets.Dataset`: int [rows]; None if
        the order cannot put long rows first, because rows are packed blocks."""
        import numpy
        from pyarrow import compute

        if "seq_lengths" in self.columns:
            return numpy.asarray([max(lengths) for lengths in dataset.data.column("seq_lengths").to_pylist()])
        if "seq_lengths" in dataset.column_names:
            return None
        return compute.list_value_length(dataset.data.column("input_ids")).to_numpy()

    def traced(self, length: int, packing: bool) -> dict[str, Any]:
        """Return a stored row whose sequences all have `length` trained tokens."""
        ids = [1] * length * self.sequences
        lengths = (
            {"seq_lengths": [length] * self.sequences} if packing or "seq_lengths" in self.columns else {}
        )
        return {
            "input_ids": ids,
            "labels": ids,
            **lengths,
            **({"label": 1} if "label" in self.columns else {}),
        }


class UnpredictedRows(RowKind):
    """Rows of texts of which no token is predicted."""

    cuts = "truncate or drop"
    trains_labels = False

    def aligned(self, sequences: list[Encoded], samples: Sequence[Sample]) -> list[Encoded]:
        return [(ids, [IGNORED] * len(ids)) for ids, _ in sequences]


class AnsweredRows(RowKind):
    """Rows of prompts and answers, of text or of messages; all of one source are alike."""

    cuts = "truncate or drop"

    def variant(self, samples: Sequence[Sample]) -> str:
        return "messages" if isinstance(samples[0], Chat) else "text"

    def has_template(self, formats: set[str], tokenizer: Any) -> bool:
        # Of messages or of text: the marks of a template are a superset of those of text.
        return bool(tokenizer.chat_template)


class ComparedRows(AnsweredRows):
    """Rows of better and worse answers."""

    def known(self, row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
        return row_forms.compared(row, columns)

    def contradicts_itself(self, row: dict[str, Any]) -> bool:
        return "chosen" in row and left_out.contradicts(row)
