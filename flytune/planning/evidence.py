"""Intervals of a plan's figures, with the share of published runs that each of them held."""

from flytune.planning.calibration import load_factors
from flytune.planning.candidates import Fit
from flytune.records.plan import Estimate
from training_estimates import intervals, memory
from training_estimates.intervals import Band


def of(fit: Fit, steps: int | None) -> dict[str, Estimate]:
    """Return the intervals of a fit by name (flytune/records/plan.py: Plan.intervals).

    None where nothing was published: on a CPU, and for models that the closed form does not know; of runs
    that draw their answers none of time.
    """
    work, time, shape = fit.workload, fit.time, fit.shape
    if not shape.is_gpu or work.geometry.unsupported:
        return {}
    measured = load_factors().get(shape.name)
    is_calibrated, factor = measured is not None, measured.memory if measured else 1.0
    table, capacity = memory.memory(work), work.gpu_memory_gib * memory.GIB
    room = capacity - sum(table.outside.values())
    intervals_by_name = {
        "allocated_bytes": _estimate(
            factor * table.allocated, intervals.allocated(work, is_calibrated), room
        ),
        "reserved_bytes": _estimate(
            min(factor * table.reserved(capacity), room), intervals.reserved(work, is_calibrated), room
        ),
    }
    # No published run that draws its answers was compared.
    if time is None or work.decoding:
        return intervals_by_name
    band = intervals.speed(work, is_calibrated)
    rate = _estimate(work.gpus * time.tokens_per_second, band)
    intervals_by_name["tokens_per_second"] = rate
    if not is_calibrated:
        intervals_by_name["after_a_run"] = _estimate(rate.value, intervals.after_a_run())
    step = _estimate(time.seconds, band).model_copy(
        update={"low": time.seconds / band.high, "high": time.seconds / band.low}
    )
    intervals_by_name["step_seconds"] = step
    if steps:
        intervals_by_name["hours"] = step.times(steps / 3600)
        intervals_by_name["price"] = step.times(steps / 3600 * shape.total_price_per_hour)
    return intervals_by_name


def _estimate(value: float, band: Band, most: float | None = None) -> Estimate:
    """Return an estimate with its interval, which ends at `most` at the latest."""
    high = value * band.high if most is None else max(value, min(value * band.high, most))
    return Estimate(
        low=value * band.low, value=value, high=high, held_out=band.held_out, coverage=round(band.coverage, 3)
    )
