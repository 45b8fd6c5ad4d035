"""What the stages hand on: small frozen records, stored as JSON beside the data they speak of."""

from typing import Annotated

from pydantic import Field

from flytune.schema import Record, Strict


class Shard(Strict):
    """One parquet file of tokenized samples: columns input_ids and labels; packed, also seq_lengths; lists of int32."""

    file: str
    """Relative to the manifest: train/00000.parquet."""
    samples: int
    tokens: int
    sha256: str


class SplitCounts(Strict):
    """One split (train or heldout) as it was stored."""

    samples: int
    tokens: int
    trained_tokens: int
    """Tokens with a label, that is, those the loss is taken over."""
    blocks: Annotated[int | None, Field(exclude_if=lambda blocks: blocks is None)] = None
    """Rows that the samples were packed into; None where each sample is a row of its own."""
    shards: list[Shard]

    @property
    def rows(self) -> int:
        """What training draws its batches from: blocks, or samples."""
        return self.samples if self.blocks is None else self.blocks


class Bin(Strict):
    """Samples whose length in tokens, before any cut, is in [low, high)."""

    low: int
    high: int
    samples: int


class SourceCounts(Strict):
    """What one source gave."""

    name: str
    format: str
    weight: float
    rows: int
    """Read from it, bad ones included; each once."""
    bad: int
    """Set aside in bad_rows.jsonl."""
    samples: int
    """Kept of it, over both splits; more than its rows where its weight repeats them, or long ones were split."""
    tokens: int
    trained_tokens: int


class Manifest(Record):
    """manifest.json of a prepared data set, written last: a folder without one is not whole."""

    source: str
    format: str
    rows: int
    """Read from the source."""
    truncated: int
    split: int = 0
    """Rows too long that became several samples."""
    dropped_too_long: int
    dropped_untrained: int
    """Without one trained token left (an answer that was cut off whole, or empty)."""
    duplicates: int = 0
    """Samples left out by data.deduplicate."""
    bad: int = 0
    """Rows that cannot be trained on, listed in bad_rows.jsonl with their reasons."""
    max_length: int
    longest: int
    """Tokens of the longest sample before any cut."""
    tokens_read: int = 0
    """Tokens of all rows before any cut."""
    histogram: list[Bin]
    sources: list[SourceCounts] = Field(default=[])
    """In the order of the recipe; heldout_path, where the recipe names one, comes last."""
    train: SplitCounts
    heldout: SplitCounts
    tokenizer_sha256: str
    content_sha256: str
    """Over the shards' hashes in order; equal content has an equal one."""

    @property
    def useful_share(self) -> float:
        """Of the tokens of the packed blocks, the share that is samples; 1 where nothing is packed."""
        return self.train.tokens / (self.train.blocks * self.max_length) if self.train.blocks else 1.0
