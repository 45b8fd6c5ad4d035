"""Intervals of estimates: what nine of ten published runs measured, over what was estimated.

The ends were taken from the rows of development alone, as the 5th and 95th percentiles of their ratios; how
many of the held-out rows are inside was counted afterwards (`python -m benchmarks.intervals`,
docs/measured/intervals.md).
"""

from typing import NamedTuple

from training_estimates.workload import Workload

LEVEL = 0.9
"""Share of runs that an interval is meant to hold."""
ENOUGH_TOKENS = 2048
"""Tokens of a micro batch below which a step mostly waits, and its time is estimated badly."""


class Band(NamedTuple):
    """Measured over estimated: the ends of an interval, and its evidence."""

    low: float
    high: float
    fitted: int
    """Number of rows that the ends were taken from."""
    held_out: int
    """Number of other rows."""
    covered: int
    """Number of these that are inside."""

    @property
    def coverage(self) -> float:
        """Share of held-out rows that are inside."""
        return self.covered / self.held_out if self.held_out else 0.0


BANDS: dict[str, Band] = {
    "allocated, one shape": Band(0.85, 1.06, 82, 39, 37),
    "reserved, one shape": Band(0.9, 1.15, 124, 56, 51),
    "reserved, lengths vary": Band(0.8, 1.82, 24, 15, 14),
    "allocated, lengths vary": Band(0.81, 1.97, 35, 18, 17),
    "speed, enough tokens": Band(0.84, 1.09, 207, 102, 93),
    "speed, few tokens": Band(0.82, 1.16, 24, 7, 6),
    "allocated, calibrated": Band(0.97, 1.04, 75, 38, 35),
    "reserved, calibrated": Band(0.84, 1.21, 115, 51, 47),
    "speed, calibrated": Band(0.85, 1.16, 209, 97, 89),
    "speed, calibrated, same model": Band(0.87, 1.14, 175, 73, 65),
}
"""Printed by `python -m benchmarks.intervals --held-out`."""


def allocated(workload: Workload, is_calibrated: bool = False) -> Band:
    """Return the band of allocated memory; `is_calibrated` after a run on the same machines."""
    return BANDS["allocated, " + _kind(workload, is_calibrated)]


def reserved(workload: Workload, is_calibrated: bool = False) -> Band:
    """Return the band of reserved memory."""
    return BANDS["reserved, " + _kind(workload, is_calibrated)]


def speed(workload: Workload, is_calibrated: bool = False) -> Band:
    """Return the band of tokens a second."""
    if is_calibrated:
        return BANDS["speed, calibrated"]
    return BANDS["speed, enough tokens" if is_enough(workload) else "speed, few tokens"]


def after_a_run() -> Band:
    """Return the band of tokens a second once the same model has run on the same machines, with other batches
    or lengths."""
    return BANDS["speed, calibrated, same model"]


def is_enough(workload: Workload) -> bool:
    """Return whether a micro batch has enough tokens for its time to be estimated well."""
    return workload.tokens >= ENOUGH_TOKENS


def _kind(workload: Workload, is_calibrated: bool) -> str:
    if workload.variable_length:
        return "lengths vary"
    return "calibrated" if is_calibrated else "one shape"
