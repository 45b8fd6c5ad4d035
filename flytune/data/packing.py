"""Packing: complete samples into blocks of max_length tokens, so that almost no token of a batch is padding.

Best-fit decreasing, as in Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830),
in windows: the longest sample first, each into the fullest block that still has room for it. No sample is cut
or dropped.

The collator makes batches in which no sample of a packed row sees another.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flytune.data.labels import Encoded
from flytune.models.images import StoredImages
from flytune.models.scoring import IGNORED
from flytune.models.sequence_parallel import COMPLETE, WHOLE, SequencePart

WINDOW_TOKENS = 4_000_000
"""Tokens packed at a time; 8 bytes each in memory."""
WINDOW_BLOCKS = 256
"""Smallest number of blocks that are packed at a time, whatever their length: a half-empty last block costs
at most 0.4 %."""

Block = tuple[Any, Any, list[int]]
"""input_ids and labels (int32 arrays) of complete samples one after the other, and the samples' lengths in
that order."""


class PackingWindow:
    """Samples waiting to be packed. Equal samples in equal order give equal blocks."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._capacity = max(WINDOW_TOKENS, WINDOW_BLOCKS * max_length)
        self._samples: list[tuple[Any, Any]] = []
        self._tokens = 0

    def add(self, sample: Encoded | tuple[Any, Any]) -> Iterator[Block]:
        """Add a sample of at most max_length tokens; return the blocks of the window if it is now full."""
        import numpy

        # Lists of integers take eight times the memory.
        ids, labels = (numpy.asarray(numbers, dtype=numpy.int32) for numbers in sample)
        self._samples.append((ids, labels))
        self._tokens += len(sample[0])
        return self.flush() if self._tokens >= self._capacity else iter(())

    def flush(self) -> Iterator[Block]:
        """Return the blocks of all waiting samples."""
        samples, self._samples, self._tokens = self._samples, [], 0
        return _blocks(samples, self._max_length)


def _blocks(samples: list[tuple[Any, Any]], max_length: int) -> Iterator[Block]:
    import numpy

    for block in pack([len(ids) for ids, _ in samples], max_length):
        ids, labels = (numpy.concatenate([samples[index][place] for index in block]) for place in (0, 1))
        yield ids, labels, [len(samples[index][0]) for index in block]


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Assign samples of these lengths (in tokens, each at most max_length) to blocks: lists of their numbers
    in `lengths`.

    The samples of a block, and the blocks by their first sample, are in the order of `lengths`: best-fit
    decreasing makes the blocks of long samples first, and the stored blocks must not be sorted by length.

    O(n log n) comparisons; the sorted list of rooms has max_length entries at most.
    """
    rooms: list[int] = []  # The different rooms that blocks have left, ascending.
    blocks_of: dict[int, list[list[int]]] = {}  # The blocks that have that room.
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        assert 0 < length <= max_length, length
        place = bisect_left(rooms, length)
        room, block = (
            (rooms[place], blocks_of[rooms[place]].pop()) if place < len(rooms) else (max_length, [])
        )
        if place < len(rooms) and not blocks_of[room]:
            del blocks_of[room], rooms[place]
        block.append(index)
        room -= length
        if room not in blocks_of:
            blocks_of[room] = []
            insort(rooms, room)
        blocks_of[room].append(block)
    return sorted(sorted(block) for blocks in blocks_of.values() for block in blocks)


@dataclass(frozen=True)
class Collator:
    """The Trainer's data_collator: batches of rows with input_ids and labels, for training and for scoring
    during training.

    Rows without seq_lengths are padded on the right to the longest, with an attention_mask, as TRL does.

    Rows with seq_lengths (data.packing) are padded to `max_length`: batches of one shape avoid fragmentation
    of the allocator's memory. Positions count from 0 in each sample, and are 0 in all of the padding. There
    is no attention_mask: transformers (5.23, masking_utils) separates samples by their positions only without
    one, and without a cache.
    """

    pad_token_id: int
    max_length: int
    """Tokens of a packed row."""
    flatten: bool = False
    """True for FlashAttention, which reads position_ids of a single row only: packed rows are joined into
    one, with the boundaries of the samples."""

    images: StoredImages | None = None
    """Images of rows that may have some."""

    part: SequencePart = COMPLETE
    """SequencePart of each row that this process computes."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch of int64 tensors [rows, length]; flattened, [1, rows x max_length].

        The keys are input_ids, labels, and attention_mask or position_ids; flattened, also FlashAttention's
        arguments. Where processes share rows, it is the process's part of them (SequencePart.of).
        """
        return self.part.of(self._whole(rows))

    def _whole(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        if "seq_lengths" not in rows[0]:
            width = self.part.rounded(max(len(row["input_ids"]) for row in rows))
            mask = [_padded([1] * len(row["input_ids"]), width, 0) for row in rows]
            batch = self._tokens(rows, width) | {"attention_mask": torch.tensor(mask)}
            return batch | (self.images.inputs(rows, batch["input_ids"]) if self.images else {})
        width = self.part.rounded(self.max_length)
        batch = self._tokens(rows, width)
        positions = [[place for length in row["seq_lengths"] for place in range(length)] for row in rows]
        batch["position_ids"] = torch.tensor([_padded(row, width, 0) for row in positions])
        # No token precedes a sample's first token, so nothing could predict it.
        batch["labels"][batch["position_ids"] == 0] = IGNORED
        return self._flattened(batch, rows) if self.flatten else batch

    def _tokens(self, rows: list[dict[str, list[int]]], width: int) -> dict[str, Any]:
        import torch

        fill = {"input_ids": self.pad_token_id, "labels": IGNORED}
        return {
            name: torch.tensor([_padded(row[name], width, value) for row in rows])
            for name, value in fill.items()
        }

    def _flattened(self, batch: dict[str, Any], rows: list[dict[str, list[int]]]) -> dict[str, Any]:
        import torch

        lengths: list[int] = []
        for row in rows:
            padding = batch["input_ids"].shape[1] - sum(row["seq_lengths"])
            lengths += [*row["seq_lengths"], *([padding] if padding else [])]
        boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        flat = {name: tensor.view(1, -1) for name, tensor in batch.items()}
        return flat | {
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }


def tokens_of(batch: dict[str, Any]) -> Any:
    """Return the number of tokens of a Collator's batch without padding: a 0-dimensional tensor on the
    batch's device.

    (TRL's num_tokens counts one row of a packed batch, with its padding.)
    """
    if "attention_mask" in batch:
        return batch["attention_mask"].sum()
    # Padding has position 0, and is not followed by position 1: samples of one token train nothing and are
    # never prepared.
    starts = batch.get(WHOLE, batch["position_ids"]) == 0
    begun = starts[:, :-1] & ~starts[:, 1:]
    return (~starts).sum() + begun.sum()


def _padded(values: list[int], width: int, value: int) -> list[int]:
    return values + [value] * (width - len(values))
