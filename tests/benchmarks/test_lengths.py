from statistics import mean, pstdev

from benchmarks import allocator, lengths
from benchmarks.allocator import MIB
from flytune.dryrun.allocations import OPTIMIZER, AllocationLedger, Life

BASE, STATES, LOGITS = 30 * MIB, 20 * MIB, 100 * MIB


def ledger(tokens):
    """A step of a base, states of the optimizer, and two tensors of logits, one after the other."""
    ledger = AllocationLedger(allocator.BLOCK, stages=[("load", 0), ("forward", 1)], now=9)
    size = LOGITS * tokens // lengths.TRACED[1]
    ledger.lives += [Life(BASE, 0, "empty", ""), Life(size, 2, "mm", "", 4), Life(size, 3, "_to_copy", "", 5)]
    ledger.lives.append(Life(STATES, 6, "zeros", "", None, OPTIMIZER))
    return ledger


def test_rows_of_one_length_are_replayed_as_the_dry_run_replays_them():
    pair = ledger(512), ledger(1024)
    for length, traced in zip(lengths.TRACED, pair, strict=True):
        found, plain = (
            lengths.replayed(pair, [length] * 3, expandable=False),
            allocator.replay(traced, allocator.CachingAllocator()),
        )
        assert (found.peak_reserved, found.peak_allocated) == (plain.peak_reserved, plain.peak_allocated)


def test_a_longer_row_needs_new_segments_unless_they_grow():
    pair, rows = (ledger(512), ledger(1024)), [256, 512, 1024]
    # Segments are multiples of 2 MiB; the states take a free one.
    assert lengths.replayed(pair, rows, expandable=False).peak_reserved == BASE + 2 * (26 + 50 + 100) * MIB
    assert lengths.replayed(pair, rows, expandable=True).peak_reserved <= BASE + STATES + (2 * 100 + 20) * MIB


def test_lengths_are_drawn_below_the_limit():
    every = lengths.drawn(10**9, 1, 20_000)
    assert abs(mean(every) / lengths.MEAN - 1) < 0.05
    assert abs(pstdev(every) / lengths.DEVIATION - 1) < 0.2
    assert max(lengths.drawn(512, 1, 100)) <= 512
