"""The interval between checkpoints that minimizes the time lost to saves and interruptions.

Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly, "A higher order estimate
of the optimum checkpoint interval for restart dumps" (2006), equation 37.
"""

import math
from typing import NamedTuple

from flytune.hardware import Shape
from flytune.recipe import Recipe
from flytune.records import Interruptions
from flytune.sentences import counted

GPU_INTERRUPTIONS_PER_HOUR = 419 / (54 * 24 * 16_384)
"""Rate of one rented GPU: Llama 3's training, 419 unexpected interruptions in 54 days on 16,384 H100
(arXiv:2407.21783)."""
SPOT_INTERRUPTIONS_PER_HOUR = 0.05
"""Rate of one spot node: a guess of one in 20 hours, for rows without interruptions_per_hour."""
WRITE_RATE = 1e9
"""Bytes a second at which a node writes a checkpoint: assumed of an NVMe disk, until a run has measured its
own."""
RESTART_SECONDS = 600.0
"""Time from an interruption to the next step: assumed for starting machines and reading weights; the image is
there."""


def interruptions_per_hour(shape: Shape) -> float:
    """Return the rate of all nodes together: the row's, or a likely one."""
    if shape.interruptions_per_hour is not None:
        return shape.interruptions_per_hour
    if shape.spot:
        return shape.nodes * SPOT_INTERRUPTIONS_PER_HOUR
    return shape.world_size * GPU_INTERRUPTIONS_PER_HOUR


def young(save_seconds: float, interruptions_per_hour: float) -> float:
    """Return seconds of training between two saves, to first order: sqrt(2 x save x mean time between
    interruptions)."""
    if interruptions_per_hour == 0:
        return math.inf
    return math.sqrt(2 * save_seconds * 3600 / interruptions_per_hour)


def best_interval(save_seconds: float, interruptions_per_hour: float) -> float:
    """Return seconds of training between two saves that lose least (Daly); the mean time if a save takes
    twice as long."""
    if interruptions_per_hour == 0:
        return math.inf
    mean = 3600 / interruptions_per_hour
    if save_seconds >= 2 * mean:
        return mean
    ratio = save_seconds / (2 * mean)
    return young(save_seconds, interruptions_per_hour) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


class ExpectedLoss(NamedTuple):
    """Expected cost of interruptions and saves."""

    hours_per_interruption: float
    """Hours of repeated training and of waiting."""
    share_of_run: float
    """Share of the run's time for saves, repeated training and restarts."""


def expected_loss(
    interval_seconds: float, save_seconds: float, interruptions_per_hour: float, restart_seconds: float = 0.0
) -> ExpectedLoss:
    """Return the loss of saving every `interval_seconds` of training, where a restart takes `restart_seconds`
    (machines, load).

    An interruption comes at any time between two saves, so half of the interval is lost on average (first
    order, as Young's: good while interruptions are rarer than saves). With an interval of inf nothing is
    saved, and each attempt starts over.
    """
    if math.isinf(interval_seconds):
        return ExpectedLoss(
            math.inf if interruptions_per_hour else 0.0, 1.0 if interruptions_per_hour else 0.0
        )
    hours = ((interval_seconds + save_seconds) / 2 + restart_seconds) / 3600
    saving = save_seconds / (interval_seconds + save_seconds)
    return ExpectedLoss(hours, min(1.0, saving + hours * interruptions_per_hour))


def planned(
    recipe: Recipe, shape: Shape, checkpoint_bytes: float, step_seconds: float, samples: int | None = None
) -> Interruptions | None:
    """Return the expected loss of a run with its recipe's interval; `checkpoint_bytes` are those of all nodes
    together.

    None with save_steps `epoch` or a share of all steps, where the number of training `samples`, and so of
    steps, is unknown.
    """
    per_hour, save_seconds = interruptions_per_hour(shape), checkpoint_bytes / shape.nodes / WRITE_RATE
    best, steps = best_interval(save_seconds, per_hour), recipe.checkpoints.save_steps
    training = recipe.training
    if isinstance(steps, float) and training.max_steps:
        steps = math.ceil(steps * training.max_steps)
    elif steps == "epoch" or isinstance(steps, float):
        if samples is None:
            return None
        epochs = steps * training.num_train_epochs if isinstance(steps, float) else 1.0
        steps = max(1, round(samples * epochs / training.global_batch_size))
    interval = math.inf
    if isinstance(steps, str):
        interval = best
    elif steps:
        interval = steps * step_seconds
    lost = expected_loss(interval, save_seconds, per_hour, RESTART_SECONDS)
    return Interruptions(
        per_hour=per_hour,
        save_seconds=save_seconds,
        interval_seconds=interval if math.isfinite(interval) else None,
        best_interval_seconds=best if math.isfinite(best) else None,
        hours_lost_each=lost.hours_per_interruption if steps else None,
        share_lost=lost.share_of_run if steps else 0.0,
    )


def describe(forecast: Interruptions) -> str:
    """Return the expected loss as a sentence."""
    often = (
        f"about one interruption in {_hours(3600 / forecast.per_hour)} is expected"
        if forecast.per_hour
        else "no interruption is expected"
    )
    best = (
        f"a save every {_hours(forecast.best_interval_seconds)}" if forecast.best_interval_seconds else "none"
    )
    if forecast.interval_seconds is None and forecast.per_hour:
        return f"{often}, and loses the whole run: checkpoints.save_steps is not set (auto: {best})"
    if forecast.interval_seconds is None:
        return often
    lost_by_each = _hours((forecast.hours_lost_each or 0.0) * 3600)
    lost = f"{forecast.share_lost:.2%} of the run is lost to saves and interruptions, {lost_by_each} by each"
    guess = f"auto: {best}, guessed at {forecast.save_seconds:.0f} s a save"
    return f"{often}; saving every {_hours(forecast.interval_seconds)}, {lost} ({guess})"


_YEAR = 365 * 24


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    if hours >= _YEAR:
        return counted(round(hours / _YEAR), "year")
    if hours >= 48:
        return f"{hours / 24:,.0f} days"
    return f"{hours:.1f} hours" if hours >= 1 else f"{seconds / 60:.0f} minutes"
