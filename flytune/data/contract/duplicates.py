"""Equal and nearly equal samples, found by hashing.

Equal: a 64-bit hash of a sample's tokens. Nearly equal: MinHash signatures over token 5-grams (Broder 1997,
"On the resemblance and containment of documents"), compared where they agree in a band (locality-sensitive
hashing: Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", chapter 3). A near duplicate shares at
least 80 % of its 5-grams, by the signatures.
"""

from collections.abc import Container
from typing import Any

GRAM = 5
"""Tokens of a gram."""
PERMUTATIONS = 64
"""Permutations of a signature. The share of them that agrees has an error of about 0.05 at a resemblance of
0.8."""
ROWS_A_BAND = 4
"""Rows of a band: with 16 bands, a pair of resemblance 0.8 is missed once in 5,000, one of 0.5 is compared in
2 of 3 cases."""
RESEMBLANCE = 0.8
COMMON = 0.1
"""Share of samples from which on a 5-gram is common (in a system prompt or a template) and does not
distinguish samples."""
_COMMON_SAMPLES = 2000
"""Number of first samples from which the common 5-grams are found; with fewer than a tenth of it, no 5-gram
is common."""
_CHUNK = 65_536
"""5-grams that are hashed at a time: they fit into the processor's cache."""


def fingerprints(ids: Any, starts: Any, lengths: Any) -> Any:
    """Return a uint64 for each sample: a hash of its length and the sum over its tokens of a hash of token
    and position."""
    import numpy

    if not len(starts):
        return numpy.zeros(0, numpy.uint64)
    positions = numpy.arange(len(ids)) - numpy.repeat(starts, lengths)
    hashed = _mixed(
        (positions.astype(numpy.uint64) << numpy.uint64(32)) ^ ids.astype(numpy.uint32).astype(numpy.uint64)
    )
    return _mixed(numpy.add.reduceat(hashed, starts) + lengths.astype(numpy.uint64))


class Hashes:
    """Hashes of many samples, each stored once with the number of its samples: 16 bytes for each different
    one."""

    def __init__(self, waiting: int) -> None:
        import numpy

        self._waiting, self._parts = waiting, list[Any]()
        self._merged = numpy.zeros(0, numpy.uint64), numpy.zeros(0, numpy.int64)

    def add(self, hashes: Any, share: float = 1.0) -> None:
        """Add those of a share drawn by content; they are merged once more than `waiting` are unmerged."""
        self._parts.append(hashes[below(hashes, share)])
        if sum(map(len, self._parts)) > self._waiting:
            self.counts()

    def counts(self) -> tuple[Any, Any]:
        """Return all different hashes in order (uint64), and how often each was added (int64)."""
        import numpy

        if self._parts:
            values, counts = self._merged
            added = numpy.unique(numpy.concatenate(self._parts), return_counts=True)
            values, order = numpy.unique(numpy.concatenate([values, added[0]]), return_inverse=True)
            total = numpy.zeros(len(values), numpy.int64)
            numpy.add.at(total, order, numpy.concatenate([counts, added[1]]))
            self._merged, self._parts = (values, total), []
        return self._merged

    def contains(self, hashes: Any) -> Any:
        """Return for each of `hashes` whether it was added (bool)."""
        import numpy

        known = self.counts()[0]
        if not len(known):
            return numpy.zeros(len(hashes), bool)
        return known[numpy.minimum(numpy.searchsorted(known, hashes), len(known) - 1)] == hashes


def below(hashes: Any, share: float) -> Any:
    """Return for each hash whether it belongs to a share drawn by content (bool)."""
    import numpy

    return numpy.ones(len(hashes), bool) if share >= 1 else hashes < numpy.uint64(int(share * 2**64))


def new(hashes: Any, share: float, kept: Container[int]) -> list[int]:
    """Return the numbers of the samples to keep beside those kept already, by their hashes: the first of each
    group of equal ones, in a share drawn by content."""
    import numpy

    drawn = numpy.flatnonzero(below(hashes, share))
    firsts = drawn[numpy.sort(numpy.unique(hashes[drawn], return_index=True)[1])]
    return [sample for sample in firsts.tolist() if int(hashes[sample]) not in kept]


def signatures(samples: list[Any]) -> tuple[Any, Any]:
    """Return MinHash signatures of samples (int32 arrays of tokens).

    Returns:
        The signatures of the samples with a 5-gram that is not common, uint32 [signed, PERMUTATIONS]: for
        each permutation the smallest of a sample's hashed 5-grams; and the numbers of these samples, int64
        [signed].
    """
    import numpy

    grams, counts = _without_common(*_grams(samples))
    which = numpy.flatnonzero(counts)
    starts = (counts.cumsum() - counts)[which]
    draw = numpy.random.default_rng(0)
    factors = draw.integers(0, 2**31, PERMUTATIONS, dtype=numpy.uint32) * numpy.uint32(2) + numpy.uint32(1)
    shifts = draw.integers(0, 2**32, PERMUTATIONS, dtype=numpy.uint32)
    signed = numpy.empty((len(which), PERMUTATIONS), numpy.uint32)
    first = 0
    while first < len(which):
        last = max(first + 1, int(numpy.searchsorted(starts, starts[first] + _CHUNK)))
        chunk = grams[starts[first] : starts[last] if last < len(which) else len(grams)]
        hashed = numpy.empty_like(chunk)
        for number in range(PERMUTATIONS):
            numpy.multiply(chunk, factors[number], out=hashed)
            hashed += shifts[number]
            signed[first:last, number] = numpy.minimum.reduceat(hashed, starts[first:last] - starts[first])
        first = last
    return signed, which


def earlier(signed: Any) -> Any:
    """Return for each signature the number of an earlier one that nearly equals it, or -1: int64 [signed].

    Each signature is compared with the first and the last one before it that agree in a band: O(samples), and
    few are missed.
    """
    import numpy

    earlier_ones = numpy.full(len(signed), -1, numpy.int64)
    for band in range(0, PERMUTATIONS, ROWS_A_BAND):
        keys = numpy.zeros(len(signed), numpy.uint64)
        for column in range(band, band + ROWS_A_BAND):
            keys = _mixed(keys + signed[:, column])
        order = numpy.argsort(keys, kind="stable")
        begins = numpy.ones(len(order), bool)
        begins[1:] = keys[order[1:]] != keys[order[:-1]]
        firsts = order[numpy.maximum.accumulate(numpy.where(begins, numpy.arange(len(order)), 0))]
        for later, before in ((order, firsts), (order[1:], order[:-1])):
            candidates = (later != before) & (earlier_ones[later] < 0) & (keys[later] == keys[before])
            left, right = later[candidates], before[candidates]
            near = (signed[left] == signed[right]).mean(axis=1) >= RESEMBLANCE
            earlier_ones[left[near]] = right[near]
    return earlier_ones


def _grams(samples: list[Any]) -> tuple[Any, Any]:
    """Return the hashes of all 5-grams (uint32), and the number of them in each sample."""
    import numpy

    lengths = numpy.asarray([len(sample) for sample in samples], numpy.int64)
    counts = numpy.maximum(lengths - GRAM + 1, 0)
    if not counts.any():
        return numpy.zeros(0, numpy.uint32), counts
    ids = numpy.concatenate(samples).astype(numpy.uint64)
    total = len(ids) - GRAM + 1
    hashed = numpy.zeros(total, numpy.uint64)
    for place in range(GRAM):
        hashed = hashed * numpy.uint64(0x9E3779B97F4A7C15) + ids[place : place + total]
    # A 5-gram must not reach into the next sample.
    inside = numpy.repeat(lengths.cumsum(), lengths)[:total] - numpy.arange(total) >= GRAM
    return (_mixed(hashed[inside]) >> numpy.uint64(32)).astype(numpy.uint32), counts


def _without_common(grams: Any, counts: Any) -> tuple[Any, Any]:
    """Remove the common 5-grams, which are found among those of the first samples."""
    import numpy

    some = counts[:_COMMON_SAMPLES]
    if len(some) < _COMMON_SAMPLES // 10:
        return grams, counts
    owners = numpy.repeat(numpy.arange(len(some), dtype=numpy.uint64), some)
    different = numpy.unique((owners << numpy.uint64(32)) | grams[: len(owners)])
    values, samples = numpy.unique(different & numpy.uint64(2**32 - 1), return_counts=True)
    common = values[samples > COMMON * len(some)].astype(numpy.uint32)
    if not len(common):
        return grams, counts
    kept = ~numpy.isin(grams, common)
    owners = numpy.repeat(numpy.arange(len(counts)), counts)
    return grams[kept], numpy.bincount(owners[kept], minlength=len(counts))


def _mixed(values: Any) -> Any:
    """Apply splitmix64's finalizer (Steele, Lea and Flood 2014): each output bit of a uint64 depends on each
    input bit."""
    import numpy

    values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return values ^ (values >> numpy.uint64(31))
