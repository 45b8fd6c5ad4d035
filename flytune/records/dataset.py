"""manifest.json: the record of a prepared data set."""

from typing import Any

from pydantic import Field, model_validator

from flytune.names import FileName
from flytune.row_names import ANSWERS, RowKindName, with_row_kind
from flytune.schema import Record, Strict, omitted


class Shard(Strict):
    """A Parquet file of tokenized samples: columns input_ids and labels, and seq_lengths if packed; lists of
    int32."""

    file: FileName
    """Path relative to the manifest: train/00000.parquet."""
    samples: int
    tokens: int
    sha256: str


class SplitCounts(Strict):
    """A stored split: train or heldout."""

    samples: int
    tokens: int
    trained_tokens: int
    """Number of tokens with a label, which the loss is computed on."""
    blocks: int | None = omitted(None)
    """Number of rows that the samples were packed into; None if each sample is a row of its own."""
    desirable: int | None = omitted(None)
    """Number of samples whose answer is labelled desirable; None for answers without labels."""
    classes: list[int] = omitted([])
    """Number of samples that have each label, up to the last one that some have; empty where rows have
    none."""
    shards: list[Shard]

    @property
    def rows(self) -> int:
        """Number of rows that training draws its batches from: blocks, or samples."""
        return self.samples if self.blocks is None else self.blocks


class Bin(Strict):
    """Number of samples whose length in tokens, before truncation, is in [low, high)."""

    low: int
    high: int
    samples: int


class SourceCounts(Strict):
    """Counts of one source."""

    name: str
    format: str
    weight: float
    rows: int
    """Number of rows read, bad ones included; each counted once."""
    bad: int
    """Number of rows listed in bad_rows.jsonl."""
    samples: int
    """Number of samples in both splits; more than the rows if the weight repeats them or long ones were
    split."""
    tokens: int
    trained_tokens: int


class Manifest(Record):
    """manifest.json of a prepared data set, written last: a folder without one is incomplete."""

    source: str
    format: str
    rows: int
    """Number of rows read from all sources."""
    truncated: int
    """Number of samples cut at max_length."""
    split: int = 0
    """Number of long rows that became several samples."""
    dropped_too_long: int
    """Number of samples dropped because they were too long."""
    dropped_untrained: int
    """Number of samples dropped because no trained token was left (the answer was empty or completely cut
    off)."""
    duplicates: int = 0
    """Number of samples removed by data.deduplicate."""
    control_tokens: int = 0
    """Number of rows whose own text has control tokens, such as <|im_end|>."""
    bad: int = 0
    """Number of rows that cannot be trained on, listed in bad_rows.jsonl with their reasons."""
    max_length: int
    longest: int
    """Number of tokens of the longest sample before truncation."""
    tokens_read: int = 0
    """Number of tokens of all rows before truncation, of both answers of a pair; each row counted once."""
    truncated_tokens: int = 0
    """Number of tokens that were cut off."""
    dropped_tokens: int = 0
    """Number of tokens of dropped rows."""
    missing: int = omitted(0)
    """Number of rows of tables of which a text is a word for a missing value, such as None or nan."""
    first_missing: str = omitted("")
    """Location of the first of them, and the word."""
    contradicted: int = omitted(0)
    """Number of pairs whose own figures (scores, a margin) say that the rejected answer is the better one."""
    left_out: dict[str, int] = Field(default={})
    """Number of rows by the column, or the key of messages, that has content and is in no sample."""
    thoughts: dict[str, int] = omitted({})
    """Number of answers' thoughts that are trained, context, or left_out (not in the text); empty if there
    are none."""
    notes: dict[str, int] = omitted({})
    """Number of rows by what their kind notes of them for the contract; empty if there are none."""
    unused: list[str] = omitted([])
    """Settings of the recipe that no row uses, each as a clause."""
    histogram: list[Bin]
    sources: list[SourceCounts] = Field(default=[])
    """Counts by source, in the order of the recipe; heldout_path, if the recipe has one, comes last."""
    train: SplitCounts
    heldout: SplitCounts
    tokenizer_sha256: str
    other_tokens: str | None = omitted(None)
    """Class of transformers that makes other tokens than the base's tokenizer.json, which is used, and an
    example."""
    content_sha256: str
    """Hash of the shards' hashes in order; equal for equal content."""
    max_pixels: int | None = omitted(None)
    """Largest number of pixels of an image, to which larger ones are reduced; None for any."""
    row_kind: RowKindName = omitted(ANSWERS)
    """Name of the kind of rows (flytune.data.rows)."""

    classes: list[str] = omitted([])
    """Names of the labels of rows, by their numbers; empty where rows have none."""
    negatives: int = omitted(0)
    """Number of documents of a row that do not belong to its query."""

    @model_validator(mode="before")
    @classmethod
    def _before_row_kinds(cls, values: Any) -> Any:
        return with_row_kind(values)

    @property
    def useful_share(self) -> float:
        """Share of the packed blocks' tokens that are not padding; 1 without packing."""
        return self.train.tokens / (self.train.blocks * self.max_length) if self.train.blocks else 1.0
