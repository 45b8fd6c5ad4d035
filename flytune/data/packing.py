"""Packing: complete samples into blocks of max_length tokens, so that almost no token of a batch is padding.

Best-fit decreasing, as in Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830),
in windows: the longest sample first, each into the fullest block that still has room for it. No sample is cut
or dropped.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any

from flytune.data.labels import Encoded

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
