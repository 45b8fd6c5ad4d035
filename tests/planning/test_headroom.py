"""Free shares of a plan: the one that hardware.headroom asks for, and the changes by which a tight plan would
leave a tenth."""

import re

import pytest

from flytune.errors import DoesNotFit
from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.records.plan import TIGHT
from tests.support.plans import GEOMETRY, recipe_of


def made(length, headroom=None, batch=1, names=("l4-1",)):
    recipe = recipe_of(
        method="qlora",
        training={"learning_rate": 1e-4, "global_batch_size": batch},
        data={"path": "x.jsonl", "max_length": length},
        hardware={"shape": names[0], "headroom": headroom},
    )
    return planner.make(recipe, [shape_named(name) for name in names], GEOMETRY)


def advice(plan):
    return [reason for reason in plan.reasons if reason.startswith("tight: ")]


def test_the_micro_batch_is_the_largest_that_leaves_the_headroom():
    usual, more, less = (made(4096, headroom, batch=64) for headroom in (None, 0.4, 0.02))
    assert usual.memory.share <= TIGHT
    assert more.memory.share <= 0.6
    assert less.memory.share <= 0.98
    sizes = [plan.per_device_train_batch_size for plan in (more, usual, less)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1]


def test_what_leaves_too_little_is_refused_in_its_words():
    usual = made(8192)
    free = 1 - usual.memory.share
    with pytest.raises(DoesNotFit, match=r"of GPU memory for hardware.headroom 0\.\d+ missing: needs"):
        made(8192, round(free + 0.01, 4))
    assert made(8192, round(free - 0.01, 4)).memory == usual.memory
    assert planner.on_shape(recipe_of(hardware={"headroom": 0.2}), "l4-1").hardware.headroom == 0.2


def test_the_length_that_a_tight_plan_names_is_safe_and_the_next_is_not():
    plan = made(12_000)
    assert plan.verdict == "tight"
    (said,) = advice(plan)
    over = plan.memory.peak_bytes - TIGHT * plan.memory.available_bytes
    assert said.startswith(
        f"tight: {over / 2**30:.1f} GiB of GPU memory less would leave a tenth free, as with "
    )
    length = int(re.search(r"as with data.max_length: (\d+) \(on l4-1, ", said)[1])
    assert [made(length + more).verdict for more in (0, 1)] == ["fits", "tight"]
    assert advice(made(length)) == []


def test_another_machine_is_named_with_what_it_leaves():
    (said,) = advice(made(12_000, names=("l4-1", "a100-80gb-1")))
    assert "; or with hardware.shape: a100-80gb-1 ($3.67 an hour, " in said
    assert f"{1 - made(12_000, names=('a100-80gb-1',)).binding.share:.0%} to spare)" in said
