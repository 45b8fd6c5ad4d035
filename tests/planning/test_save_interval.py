import math
import random

import pytest

from flytune.hardware import shape_named
from flytune.planning import save_interval
from flytune.planning.save_interval import best_interval, expected_loss, interruptions_per_hour, young
from tests.support.plans import recipe_of


def test_daly_s_is_young_s_less_the_save_where_saves_are_short_and_ends_at_the_mean_time():
    assert young(30, 1) == pytest.approx(math.sqrt(2 * 30 * 3600))
    assert young(30, 0) == best_interval(10, 0) == math.inf
    assert best_interval(1, 0.01) == pytest.approx(young(1, 0.01) - 1, rel=1e-2)
    assert best_interval(10_000, 1) == 3600


def simulated(interval, save, per_hour, restart, hours=4000):
    """Share of the time that trains nothing that lasts, over many interruptions."""
    draw, now, kept = random.Random(0), 0.0, 0.0
    next_stop = draw.expovariate(per_hour / 3600)
    while now < hours * 3600:
        if now + interval + save <= next_stop:
            now, kept = now + interval + save, kept + interval
        else:
            now = next_stop + restart
            next_stop = now + draw.expovariate(per_hour / 3600)
    return 1 - kept / now


@pytest.mark.parametrize(("save", "per_hour", "restart"), [(30, 0.2, 120), (60, 1.0, 300), (5, 0.05, 60)])
def test_the_loss_is_that_of_a_simulated_run_and_the_interval_the_best_of_it(save, per_hour, restart):
    best = best_interval(save, per_hour)
    assert expected_loss(best, save, per_hour, restart).share_of_run == pytest.approx(
        simulated(best, save, per_hour, restart), rel=0.15
    )
    for factor in (0.3, 3.0):
        assert simulated(best * factor, save, per_hour, restart) > simulated(best, save, per_hour, restart)
        assert (
            expected_loss(best * factor, save, per_hour).share_of_run
            > expected_loss(best, save, per_hour).share_of_run
        )


def test_half_of_what_lies_between_two_saves_is_lost():
    assert expected_loss(3500, 100, 1, restart_seconds=1800).hours_per_interruption == 1.0
    assert expected_loss(math.inf, 100, 1).share_of_run == 1.0
    assert expected_loss(math.inf, 100, 0) == (0.0, 0.0)


def test_a_row_says_its_interruptions_or_they_follow_from_its_machines():
    machines = shape_named("h100-8")
    assert interruptions_per_hour(machines) == pytest.approx(8 * 1.973e-5, rel=1e-3)
    assert interruptions_per_hour(machines.model_copy(update={"spot": True, "nodes": 2})) == 0.1
    assert interruptions_per_hour(machines.model_copy(update={"interruptions_per_hour": 0.5})) == 0.5


def lost(save_steps, samples=None, **changes):
    shape = shape_named("a100-80gb-8x2").model_copy(update={"interruptions_per_hour": 0.1} | changes)
    recipe = recipe_of(checkpoints={"save_steps": save_steps})
    return save_interval.planned(recipe, shape, checkpoint_bytes=200e9, step_seconds=10.0, samples=samples)


def test_a_plan_says_what_saving_and_interruptions_cost():
    found = lost(100)
    assert found.save_seconds == 100, "each of two nodes writes 100 GB at 1 GB/s"
    assert found.interval_seconds == 1000
    assert found.best_interval_seconds == pytest.approx(best_interval(100, 0.1))
    each = (1000 + 100) / 2 / 3600 + save_interval.RESTART_SECONDS / 3600
    assert found.hours_lost_each == pytest.approx(each)
    assert found.share_lost == pytest.approx(100 / 1100 + 0.1 * each)
    assert lost("auto").share_lost < found.share_lost
    assert save_interval.describe(found).startswith(
        "about one interruption in 10.0 hours is expected; saving every 17 minutes, "
    )


@pytest.mark.parametrize(("steps", "same"), [("epoch", 100), (0.5, 50)])
def test_epochs_and_shares_are_counted_where_the_number_of_samples_is_known(steps, same):
    assert lost(steps) is None
    assert lost(steps, samples=8 * 100) == lost(same)


def test_a_plan_without_checkpoints_says_what_an_interruption_loses():
    found = lost(None)
    assert (found.interval_seconds, found.hours_lost_each, found.share_lost) == (None, None, 0.0)
    assert (
        "loses the whole run: checkpoints.save_steps is not set (auto: a save every"
        in save_interval.describe(found)
    )
    assert save_interval.describe(lost(None, interruptions_per_hour=0.0)) == "no interruption is expected"
    assert save_interval.describe(lost("auto", interruptions_per_hour=0.0)) == "no interruption is expected"
