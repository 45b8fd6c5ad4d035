"""Stored samples as flat arrays, one row group of a shard at a time: reading all of them takes the memory of
one group."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flytune.data.contract.duplicates import fingerprints
from flytune.data.shards import numbers_of
from flytune.models.images import COLUMN
from flytune.models.scoring import CLASSES, IGNORED
from flytune.records import SplitCounts


@dataclass(frozen=True)
class StoredSamples:
    """Samples that follow one another in a shard, packed or not."""

    file: str
    """Relative to the data set: train/00000.parquet."""
    ids: Any
    """int32 [tokens]: the tokens of all samples, one after the other."""
    labelled: Any
    """bool [tokens]: True for tokens with a label."""
    lengths: Any
    """int64 [samples]."""
    rows: Any
    """int64 [samples]: the row of the file that a sample is in."""
    inconsistent: int
    """Rows whose seq_lengths do not add up to their tokens."""
    desirable: Any = None
    """bool [samples]: the label of each answer; None where answers have none."""
    classes: list[tuple[int, ...]] | None = None
    """Places of the labels of each text; None where rows have none."""

    images: list[str] | None = None
    """The images of each sample, as COLUMN has them; None where samples have none."""

    @cached_property
    def starts(self) -> Any:
        """int64 [samples]: the index of a sample's first token."""
        return self.lengths.cumsum() - self.lengths

    @cached_property
    def trained(self) -> Any:
        """Bool [tokens]: True for tokens that the loss is computed on: all with a label, except the first of
        a sample."""
        trained = self.labelled.copy()
        trained[self.starts] = False
        return trained

    @cached_property
    def hashes(self) -> Any:
        """uint64 [samples]: hashes of the samples' tokens and images; equal samples have equal hashes."""
        import numpy

        hashes = fingerprints(self.ids, self.starts, self.lengths)
        if self.images is None:
            return hashes
        digests = b"".join(hashlib.sha256(digest.encode()).digest()[:8] for digest in self.images)
        return hashes ^ numpy.frombuffer(digests, numpy.uint64)

    def label_of(self, row: int) -> bool | tuple[int, ...] | None:
        """Return the label of a stored row: desirable or not, or the places of its labels; None without
        one."""
        if self.classes is not None:
            return self.classes[row]
        return None if self.desirable is None else bool(self.desirable[row])

    def tokens(self, sample: int) -> Any:
        """Return the tokens of one sample: int32."""
        return self.ids[self.starts[sample] : self.starts[sample] + self.lengths[sample]]

    def compared_tokens(self, sample: int) -> Any:
        """Return a copy of the tokens of one sample by which nearly equal ones are found: those of equal text
        about other images have none in common."""
        tokens = self.tokens(sample).copy()
        if self.images is None or not self.images[sample]:
            return tokens
        digest = hashlib.sha256(self.images[sample].encode()).digest()
        return tokens ^ (int.from_bytes(digest[:4]) >> 1)

    def where(self, sample: int) -> str:
        """Return the location of a sample: `train/00000.parquet row 12`."""
        return f"{self.file} row {self.rows[sample]}"


def parts(folder: Path, counts: SplitCounts) -> Iterator[StoredSamples]:
    """Yield all samples of a split, in stored order; samples without tokens are omitted."""
    from pyarrow.parquet import ParquetFile

    for shard in counts.shards:
        with ParquetFile(folder / shard.file) as file:
            row = 0
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                yield part_of(shard.file, table, row)
                row += len(table)


def part_of(file: str, table: Any, first_row: int) -> StoredSamples:
    """Return the samples of a table of a shard; `first_row` is the number of rows before it."""
    import numpy

    columns = {name: table[name].combine_chunks() for name in table.column_names}
    row_lengths = numbers_of(columns["input_ids"].value_lengths()).astype(numpy.int64)
    lengths, rows, inconsistent = row_lengths, numpy.arange(first_row, first_row + len(row_lengths)), 0
    if "seq_lengths" in columns:
        samples = numbers_of(columns["seq_lengths"].value_lengths())
        packed = numbers_of(columns["seq_lengths"].flatten()).astype(numpy.int64)
        numbers = numpy.repeat(numpy.arange(len(row_lengths)), samples)
        is_inconsistent = numpy.bincount(numbers, packed, len(row_lengths)) != row_lengths
        # An inconsistent row is treated as one sample.
        kept = ~is_inconsistent[numbers]
        inconsistent = int(is_inconsistent.sum())
        numbers = numpy.concatenate([numbers[kept], numpy.flatnonzero(is_inconsistent)])
        order = numpy.argsort(numbers, kind="stable")
        lengths = numpy.concatenate([packed[kept], row_lengths[is_inconsistent]])[order]
        rows = rows[numbers[order]]
    labels = numbers_of(columns["labels"].flatten())
    ids, has_tokens = numbers_of(columns["input_ids"].flatten()), lengths > 0
    desirable = (
        columns["label"].to_numpy(zero_copy_only=False)[has_tokens] == 1 if "label" in columns else None
    )
    stored = columns[CLASSES].to_pylist() if CLASSES in columns else None
    classes = [tuple(stored[row - first_row]) for row in rows[has_tokens]] if stored is not None else None
    return StoredSamples(
        file,
        ids,
        labels != IGNORED,
        lengths[has_tokens],
        rows[has_tokens],
        inconsistent,
        desirable,
        classes,
        columns[COLUMN].to_pylist() if COLUMN in columns else None,
    )
