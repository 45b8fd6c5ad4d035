"""The simulated allocator: cases by hand from the rules of CUDACachingAllocator.cpp, and properties of any
sequence."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.allocator import (
    BLOCK,
    LARGE_SEGMENT,
    MIB,
    SMALL_SEGMENT,
    CachingAllocator,
    NoRoomError,
    least_capacity,
    replay,
)
from flytune.dryrun.allocations import GRADIENTS, OPTIMIZER, PARAMETERS, AllocationLedger, Life

PAGES = SMALL_SEGMENT + LARGE_SEGMENT
SIZES = st.one_of(
    st.integers(1, 2 * MIB), st.integers(MIB, 40 * MIB), st.sampled_from([512, 513, MIB, MIB + 1, 10 * MIB])
)
# An allocation (size, stream), or the index of a block to free.
ACTIONS = st.lists(st.one_of(st.tuples(SIZES, st.integers(0, 1)), st.integers(0, 30)), max_size=60)


def reserved(*sizes, **options):
    """Return MiB that are reserved after these allocations."""
    allocator = CachingAllocator(**options)
    for size in sizes:
        allocator.allocate(int(size))
    return allocator.reserved / MIB


@pytest.mark.parametrize(
    ("sizes", "mib"),
    [
        ([1], 2),  # small blocks are cut from 2 MiB
        ([MIB, MIB], 2),
        ([MIB, MIB, 1], 4),
        ([MIB + 1], 20),  # more than 1 MiB and less than 10: cut from 20 MiB
        ([9 * MIB, 9 * MIB], 20),
        ([9 * MIB, 9 * MIB, 3 * MIB], 40),  # 2 MiB are left
        ([10 * MIB], 10),  # 10 MiB and more: a segment of its own, rounded to 2 MiB
        ([10 * MIB + 1], 12),
        ([11 * MIB, 1], 14),
        # 12 MiB less 10.5 is more than 1 MiB: a request of 1.2 MiB finds it; less 11 is not: it stays with
        # the block.
        ([10.5 * MIB, 1.2 * MIB], 12),
        ([11 * MIB, 1.0001 * MIB], 32),
    ],
)
def test_segments_by_the_size_that_is_asked_for(sizes, mib):
    assert reserved(*sizes) == mib


def test_a_block_that_is_not_split_is_allocated_with_its_rest():
    allocator = CachingAllocator()
    assert allocator.allocate(11 * MIB).size == 12 * MIB
    assert allocator.allocated == 12 * MIB
    assert CachingAllocator(expandable=True).allocate(11 * MIB).size == 11 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_used():
    allocator = CachingAllocator()
    large, small = allocator.allocate(64 * MIB), allocator.allocate(32 * MIB)
    allocator.free(large)
    allocator.free(small)
    found = allocator.allocate(30 * MIB)
    assert (found.address, found.size, allocator.reserved) == (64 * MIB, 30 * MIB, 96 * MIB)


def test_free_neighbours_of_one_segment_are_joined_and_others_are_not():
    allocator = CachingAllocator()
    whole = allocator.allocate(40 * MIB)
    other = allocator.allocate(40 * MIB)
    allocator.free(whole)
    parts = [allocator.allocate(10 * MIB) for _ in range(4)]
    assert [part.address for part in parts] == [0, 10 * MIB, 20 * MIB, 30 * MIB]
    for place in (0, 2, 3, 1):
        allocator.free(parts[place])
    allocator.free(other)
    assert allocator.allocate(40 * MIB).address == 0
    allocator.allocate(41 * MIB)
    assert allocator.reserved == 122 * MIB


def test_lengths_that_grow_leave_segments_that_are_too_small_but_not_where_segments_grow():
    classic, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    for allocator in (classic, expandable):
        for size in (20, 30, 40, 50):
            allocator.free(allocator.allocate(size * MIB))
    assert classic.reserved == 140 * MIB
    assert expandable.reserved == 60 * MIB  # pages of 20


def test_streams_share_no_blocks():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(64 * MIB, stream=1))
    allocator.allocate(64 * MIB, stream=0)
    assert allocator.reserved == 128 * MIB


def test_without_room_all_that_is_free_goes_back_to_cuda_but_not_segments_in_use():
    allocator = CachingAllocator(capacity=100 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    kept = allocator.allocate(50 * MIB)
    allocator.free(kept)
    allocator.allocate(20 * MIB)  # cut from the 40 that are free: they cannot go back
    allocator.allocate(60 * MIB)  # the 50 go back
    assert (allocator.retries, allocator.reserved) == (1, 100 * MIB)
    with pytest.raises(NoRoomError, match="62,914,560"):
        allocator.allocate(60 * MIB)


def test_pages_of_a_growing_segment_go_back_and_are_mapped_again():
    allocator = CachingAllocator(capacity=100 * MIB, expandable=True)
    first, last = allocator.allocate(70 * MIB), allocator.allocate(10 * MIB)
    allocator.free(first)
    assert allocator.reserved == 80 * MIB
    # 60 MiB are given back; the request begins at the hole before the 10 MiB in use, which is too small, so
    # it goes behind.
    found = allocator.allocate(80 * MIB)
    assert (found.address, allocator.reserved, allocator.retries) == (80 * MIB, 100 * MIB, 1)
    allocator.free(found)
    allocator.free(last)
    assert (allocator.allocate(100 * MIB).address, allocator.retries) == (60 * MIB, 1)


def run(allocator, actions):
    """Do what can be done; return the live blocks with the bytes asked for, and assert what is always
    true."""
    live = []
    for action in actions:
        if isinstance(action, tuple):
            size, stream = action
            live.append((allocator.allocate(size, stream), size))
        elif live:
            allocator.free(live.pop(action % len(live))[0])
        assert allocator.reserved >= allocator.allocated >= sum(size for _, size in live)
        ranges = sorted((block.address, block.size) for block, _ in live)
        assert all(start + size <= following for (start, size), (following, _) in pairwise(ranges))
        assert all(block.size >= size and block.size % BLOCK == 0 for block, size in live)
    return live


def free_bytes(allocator):
    return sum(size for pool in allocator._pools.values() for size, _ in pool.order)


@pytest.mark.parametrize("expandable", [False, True])
@settings(max_examples=100)
@given(actions=ACTIONS)
def test_of_any_sequence_blocks_do_not_overlap_and_all_that_is_reserved_is_allocated_or_free(
    expandable, actions
):
    allocator = CachingAllocator(expandable=expandable)
    live = run(allocator, actions)
    assert allocator.reserved == allocator.allocated + free_bytes(allocator)
    for block, _ in live:
        allocator.free(block)
    assert allocator.allocated == 0
    # Everything is joined: each segment is one block again (an expandable one is followed by what is not
    # mapped).
    for pool in allocator._pools.values():
        assert all(block.before is None for block in pool.free.values())
        assert all(block.after is None or not block.after.mapped for block in pool.free.values())
    # So what was allocated once is found again.
    before = allocator.reserved
    for action in actions:
        if isinstance(action, tuple):
            allocator.free(allocator.allocate(*action))
    assert allocator.reserved == before


@pytest.mark.parametrize("expandable", [False, True])
@settings(max_examples=100)
@given(actions=ACTIONS, capacity=st.integers(20, 200))
def test_no_more_is_reserved_than_there_is(expandable, actions, capacity):
    allocator = CachingAllocator(capacity * MIB, expandable)
    try:
        run(allocator, actions)
    except NoRoomError:
        assert allocator.retries
    assert allocator.peak_reserved <= capacity * MIB
    assert allocator.reserved == allocator.allocated + free_bytes(allocator)


@settings(max_examples=100)
@given(actions=st.lists(st.one_of(SIZES, st.just(None)), max_size=60))
def test_growing_segments_need_at_most_a_page_a_pool_more_where_the_last_allocation_is_freed_first(actions):
    """Show that with frees in another order neither of the two is always less."""
    classic, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    live, most = [], 0
    for size in actions:
        if size is not None:
            live.append((classic.allocate(size), expandable.allocate(size)))
        elif live:
            first, second = live.pop()
            classic.free(first)
            expandable.free(second)
        most = max(most, expandable.allocated)
    assert expandable.peak_reserved <= classic.peak_reserved + PAGES


def ledger_of(*lives, now):
    """Return a ledger of loading until time 1, and then a step."""
    ledger = AllocationLedger(BLOCK, stages=[("load", 0), ("forward", 1)], now=now)
    for size, born, died, kind in lives:
        ledger.lives.append(Life(size, born, "empty", "", died, kind))
    return ledger


def test_a_trace_is_replayed_with_weights_that_stay_and_optimizer_states_from_the_first_step_on():
    weights, activations, states = (
        (32 * MIB, 1, None, PARAMETERS),
        (40 * MIB, 2, 4, None),
        (24 * MIB, 3, None, OPTIMIZER),
    )
    gradients = (16 * MIB, 5, None, GRADIENTS)
    ledger = ledger_of(weights, activations, states, gradients, now=5)
    allocator = replay(ledger, CachingAllocator())
    # The last storage is freed after each step; it is cut from the 40 MiB of the activations.
    assert (allocator.peak_reserved, allocator.peak_allocated, allocator.allocated) == (
        96 * MIB,
        96 * MIB,
        56 * MIB,
    )
    on_the_host = replay(ledger, CachingAllocator(), without=[PARAMETERS, OPTIMIZER])
    assert (on_the_host.peak_reserved, on_the_host.allocated) == (40 * MIB, 0)


def test_the_least_capacity_is_that_with_cached_memory_given_back():
    # 20 to 50 MiB one after the other: 140 in all, where there is room.
    lives = [(size * MIB, 2 * place + 2, 2 * place + 3, None) for place, size in enumerate((20, 30, 40, 50))]
    ledger = ledger_of(*lives, now=9)
    peak = replay(ledger, CachingAllocator())
    assert peak.peak_reserved == 140 * MIB
    least = least_capacity(ledger, peak)
    assert 50 * MIB <= least <= 52 * MIB
    with pytest.raises(NoRoomError):
        replay(ledger, CachingAllocator(49 * MIB))


def test_the_ledger_notes_the_stream_on_which_a_storage_is_allocated():
    import torch

    ledger = AllocationLedger()
    with ledger.watch():
        first = torch.empty(8)
        with torch.cpu.stream(torch.cpu.Stream()):
            second = torch.empty(8)
        third = torch.empty(8)
    assert [life.stream for life in ledger.lives] == [0, 1, 0]
    del first, second, third
