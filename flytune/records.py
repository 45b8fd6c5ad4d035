"""What the stages hand on: small frozen records, stored as JSON beside the data they speak of."""

from typing import Annotated

from pydantic import Field

from flytune.strict import Record, Strict


class StoredFile(Strict):
    """One file of what is stored."""

    file: str
    """Relative to the record that lists it, with slashes."""
    size: int
    """In bytes."""
    sha256: str


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


class Step(Strict):
    """One logged optimizer step: a line of steps.jsonl. Times and memory are those of the first process."""

    step: int
    epoch: float
    loss: float
    """Mean over the trained tokens of the global batch, in nats."""
    eval_loss: float | None = None
    """Of the live model on the held-out samples, in nats a trained token; None where it was not scored."""
    learning_rate: float
    grad_norm: float | None
    """Before clipping."""
    seconds: float
    """Since the previous logged step (since the start of training, for the first). Its parts follow."""
    data_seconds: float
    """Fetching the micro batches."""
    forward_seconds: float
    backward_seconds: float
    """With the reduction of gradients between processes."""
    update_seconds: float
    """Clipping, optimizer and schedule."""
    eval_seconds: float
    """Scoring the live model."""
    tokens: int
    """Read since the previous logged step, over all processes, padding not counted."""
    tokens_per_second: float
    """Over all processes; the time for scoring is left out."""
    memory_bytes: int
    """Peak since the previous logged step: of its fullest GPU, or of its host memory; see TrainingResult.memory_kind."""
    memory_reserved_bytes: int | None = None
    """Peak since the previous logged step of what the allocator has taken from that GPU."""

    @property
    def other_seconds(self) -> float:
        """Logging, checkpoints, and what is between the parts."""
        parts = (self.data_seconds, self.forward_seconds, self.backward_seconds, self.update_seconds, self.eval_seconds)
        return max(0.0, self.seconds - sum(parts))


class TrainingResult(Record):
    """training.json: what a training run did."""

    steps: list[Step]
    seconds: float
    """Of the training loop, loading and saving not included."""
    tokens: int
    world_size: int
    memory_kind: str
    """`GPU memory allocated` or `host memory (RSS)`."""
    peaks: dict[str, int] = Field(default={})
    """Peak bytes by phase (flytune.peaks.PHASES), of the process that held most of that kind."""
    reserved_peaks: dict[str, int] = Field(default={})
    """What the allocator had taken of that GPU; empty without one."""
    trained_parameters: int
    total_parameters: int
    heldout_loss: float | None
    """Of the live model on the first held-out samples, before export; the gate holds the export against it."""
    resumed_from_step: int = 0
    stopped_early: str | None = None
    """Why not all steps were trained, where the recipe's budget ended the run."""
    attempt: str = ""
    """As its checkpoints are named; empty where it has trained no step of its own, and they stay."""

    @property
    def tokens_per_second(self) -> float:
        """Over all processes, padding not counted."""
        return self.tokens / self.seconds if self.seconds else 0.0
