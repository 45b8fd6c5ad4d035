"""CUDA's caching allocator of torch, simulated: the memory that it reserves for a sequence of allocations and
frees.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13), without private pools of CUDA graphs,
record_stream, garbage collection and max_split_size, none of which Flytune sets. Addresses of segments ascend
in the order in which they are asked for, which a driver does not promise; they only decide between free
blocks of one size.
"""

import math
import os
import pickle
import subprocess
import sys
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from flytune import dryrun
from flytune.dryrun import Case, trace
from flytune.dryrun.allocations import OPTIMIZER, AllocationLedger
from flytune.errors import RecipeError

MIB = 2**20
# c10/core/AllocatorConfig.h: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer,
# kRoundLarge.
BLOCK = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
MIDDLE = 10 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_STEP = 2 * MIB
STEPS = 3
"""Steps that are simulated: the second is the first with optimizer states from its start."""
_APART = 2**26 * LARGE_SEGMENT
"""Address space of an expandable segment; more than any GPU has."""


def ledger_of(case: Case) -> AllocationLedger:
    """Return the ledger of a dry run, which is made in a subprocess: `flytune.dryrun.run` gives its figures
    alone.

    Raises:
        RecipeError: the model cannot be built on fake tensors.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.allocator"],
        input=case.model_dump_json().encode(),
        capture_output=True,
        env=os.environ | dryrun.VARIABLES,
    )
    if done.returncode:
        raise RecipeError((done.stderr.decode().strip().splitlines() or ["no output"])[-1][:300])
    ledger: AllocationLedger = pickle.loads(done.stdout)
    return ledger


class NoRoomError(Exception):
    """An allocation for which a GPU has no room, even after all that is cached was given back to CUDA."""


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses of one segment: allocated, free, or not mapped to memory (expandable segments)."""

    address: int
    size: int
    pool: "_Pool"
    allocated: bool = False
    mapped: bool = True
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def reach(self) -> int:
        """Size that it has or can grow to."""
        return self.size + (self.after.size if self.after is not None and not self.after.mapped else 0)


@dataclass(slots=True, eq=False)
class _Pool:
    """Blocks of one stream that are not allocated: for requests up to 1 MiB (small), or for larger ones."""

    small: bool
    order: list[tuple[int, int]] = field(default_factory=list)
    """Size and address of the free blocks, ascending."""
    free: dict[int, Block] = field(default_factory=dict)
    """Address -> free block."""
    unmapped: dict[int, Block] = field(default_factory=dict)
    """Address -> block without memory."""

    def put(self, block: Block) -> None:
        if block.mapped:
            insort(self.order, (block.size, block.address))
            self.free[block.address] = block
        else:
            self.unmapped[block.address] = block

    def take(self, block: Block) -> None:
        if block.mapped:
            del self.order[bisect_left(self.order, (block.size, block.address))]
            del self.free[block.address]
        else:
            del self.unmapped[block.address]


class CachingAllocator:
    """The state of torch's allocator on one GPU."""

    def __init__(self, capacity: float = math.inf, expandable: bool = False) -> None:
        """Begin without memory.

        Args:
            capacity: bytes that CUDA can give to the allocator.
            expandable: True for PYTORCH_ALLOC_CONF=expandable_segments:True.
        """
        self.capacity = capacity
        self.expandable = expandable
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.retries = 0
        """Times that cached memory was given back to CUDA because there was no room."""
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next = 0

    def allocate(self, size: int, stream: int = 0) -> Block:
        """Return a block of at least `size` bytes.

        Raises:
            NoRoomError: the capacity is exceeded, also after everything that can be given back was.
        """
        size = _rounded(size)
        pool = self._pools.setdefault((stream, size <= SMALL), _Pool(size <= SMALL))
        block = self._best_fit(pool, size) or self._grown(pool, size)
        if block is None:
            self.retries += 1
            self._give_back()
            block = self._grown(pool, size)
        if block is None:
            raise NoRoomError(f"{size:,} bytes, with {self.reserved:,} of {self.capacity:,} reserved")
        self._split(block, size)
        block.allocated = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, merged with free neighbours."""
        assert block.allocated
        block.allocated = False
        self.allocated -= block.size
        self._merge(block)
        block.pool.put(block)

    def _best_fit(self, pool: _Pool, size: int) -> Block | None:
        """Take the smallest free block that is large enough; one that can grow counts as large as it can
        get."""
        place = bisect_left(pool.order, (size, -1))
        if place == len(pool.order):
            return None
        block = pool.free[pool.order[place][1]]
        for _, address in pool.order[place + 1 :] if self.expandable and block.reach > block.size else ():
            if pool.free[address].reach >= block.reach:
                break
            block = pool.free[address]
        pool.take(block)
        return block

    def _grown(self, pool: _Pool, size: int) -> Block | None:
        """Ask CUDA for a segment, or for more of the expandable one; None if there is no room."""
        if self.expandable:
            return self._expanded(pool, size)
        wanted = SMALL_SEGMENT if pool.small else LARGE_SEGMENT if size < MIDDLE else _up(size, LARGE_STEP)
        return Block(self._addresses(wanted), wanted, pool) if self._reserve(wanted) else None

    def _expanded(self, pool: _Pool, size: int) -> Block | None:
        """Map pages of the expandable segment until a free block is large enough."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        block = self._start(pool, size)
        while not block.mapped or block.size < size:
            hole = block.after if block.mapped else block
            assert hole is not None
            wanted = min(_up(size - (block.size if block.mapped else 0), page), hole.size)
            if not self._reserve(wanted):
                return None
            pool.take(hole)
            if wanted < hole.size:
                pool.put(self._cut(hole, wanted))
            hole.mapped = True
            self._merge(hole)
            pool.put(hole)
            block = hole
        pool.take(block)
        return block

    def _start(self, pool: _Pool, size: int) -> Block:
        """Return the block where the first `size` bytes begin that are free or unmapped, some of them
        unmapped."""
        for address in sorted(pool.unmapped):
            start = pool.unmapped[address]
            if start.before is not None and not start.before.allocated:
                start = start.before
            room, block = 0, start
            while room < size and block is not None and not block.allocated:
                room += block.size
                block = block.after  # type: ignore[assignment]
            if room >= size:
                return start
        first_block = Block(self._addresses(_APART), _APART, pool, mapped=False)
        pool.put(first_block)
        return first_block

    def _addresses(self, size: int) -> int:
        self._next += size
        return self._next - size

    def _reserve(self, size: int) -> bool:
        if self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _split(self, block: Block, size: int) -> None:
        """Return what remains of a block to its pool, if it is enough for another."""
        rest = block.size - size
        if rest >= BLOCK if block.pool.small or self.expandable else rest > SMALL:
            block.pool.put(self._cut(block, size))

    @staticmethod
    def _cut(block: Block, size: int) -> Block:
        """Shorten a block to `size` bytes, and return the rest of it."""
        rest = Block(
            block.address + size, block.size - size, block.pool, False, block.mapped, block, block.after
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        return rest

    @staticmethod
    def _merge(block: Block) -> None:
        """Join a block that is in no pool with its neighbours that are in the same state."""
        for other in (block.before, block.after):
            if other is None or other.allocated or other.mapped != block.mapped:
                continue
            block.pool.take(other)
            block.size += other.size
            if other is block.before:
                block.address, block.before = other.address, other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block

    def _give_back(self) -> None:
        """Give to CUDA the segments that are free as a whole, and pages of expandable segments that are
        free."""
        for pool in self._pools.values():
            for block in list(pool.free.values()):
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.take(block)
                    self.reserved -= block.size

    def _unmap(self, block: Block) -> None:
        """Give back the pages that are completely in a free block."""
        pool = block.pool
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        first, end = _up(block.address, page), (block.address + block.size) // page * page
        if end <= first:
            return
        pool.take(block)
        if end < block.address + block.size:
            pool.put(self._cut(block, end - block.address))
        if first > block.address:
            front, block = block, self._cut(block, first - block.address)
            pool.put(front)
        block.mapped = False
        self.reserved -= block.size
        self._merge(block)
        pool.put(block)


def replay(
    ledger: AllocationLedger, allocator: CachingAllocator, without: Iterable[str] = (), steps: int = STEPS
) -> CachingAllocator:
    """Let the allocator serve the storages of a ledger: loading once, and then the step, `steps` times.

    Optimizer states are allocated in the first step, and stay. What the ledger saw no end of is freed after
    each step.

    Args:
        without: kinds of storages that are not on the GPU.

    Raises:
        NoRoomError: the allocator's capacity is exceeded.
    """
    _, (_, begin) = ledger.stages[:2]
    left_out = set(without)
    lives = [life for life in ledger.lives if life.kind not in left_out]
    events = [(life.born, True, life) for life in lives]
    events += [(ledger.now + 1 if life.died is None else life.died, False, life) for life in lives]
    events.sort(key=lambda event: event[0])
    blocks: dict[int, Block] = {}
    for step in range(steps):
        for time, born, life in events:
            stays = life.born <= begin or life.kind == OPTIMIZER
            if stays and (step or not born):
                # Of what is freed while the model is loaded, nothing is left.
                if not step and time <= begin:
                    allocator.free(blocks.pop(id(life)))
            elif born:
                blocks[id(life)] = allocator.allocate(life.bytes, life.stream)
            else:
                allocator.free(blocks.pop(id(life)))
    return allocator


def least_capacity(ledger: AllocationLedger, peak: CachingAllocator, without: Iterable[str] = ()) -> int:
    """Return the least capacity with which the steps do not fail, to a hundredth of what is reserved beside
    what is needed.

    Args:
        peak: the allocator that has served the ledger without a limit.
    """
    low, high = peak.peak_allocated, peak.peak_reserved
    step = max(LARGE_STEP, (high - low) // 100)
    while high - low > step:
        middle = (low + high) // 2
        try:
            replay(ledger, CachingAllocator(middle, peak.expandable), without)
            high = middle
        except NoRoomError:
            low = middle
    return high


def _rounded(size: int) -> int:
    return max(BLOCK, _up(size, BLOCK))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(trace.ledger_of(Case.parse(sys.stdin.read()))))
