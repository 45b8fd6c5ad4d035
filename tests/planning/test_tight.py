"""A plan that is tight says what would make it safe, and by how much."""

import re

import pytest

from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.records.plan import TIGHT
from tests.support.plans import GEOMETRY, recipe_of


def made(length, shape="l4-1", names=None, **changes):
    training = {"learning_rate": 1e-4, "global_batch_size": 1}
    data = {"path": "x.jsonl", "max_length": length}
    recipe = recipe_of(**({"method": "qlora", "training": training, "data": data, "hardware": {"shape": shape}} | changes))
    return recipe, planner.make(recipe, [shape_named(name) for name in names or [shape]], GEOMETRY)


def advice(plan):
    return [reason for reason in plan.reasons if reason.startswith("tight: ")]


def test_the_length_it_names_is_safe_and_the_next_is_not():
    recipe, plan = made(12_000)
    assert plan.verdict == "tight"
    (said,) = advice(plan)
    over = plan.memory.peak_bytes - TIGHT * plan.memory.available_bytes
    assert said.startswith(f"tight: {over / 2**30:.1f} GiB of GPU memory less would leave a tenth free, as with ")
    length = int(re.search(r"as with data.max_length: (\d+) \(on l4-1, ", said)[1])
    for more, verdict in ((0, "fits"), (1, "tight")):
        changed = recipe.model_dump()
        changed["data"]["max_length"] = length + more
        assert planner.make(Recipe.model_validate(changed), [shape_named("l4-1")], GEOMETRY).verdict == verdict


def test_another_machine_is_named_with_what_it_leaves():
    _, plan = made(12_000, names=["l4-1", "a100-80gb-1"])
    (said,) = advice(plan)
    assert "; or with hardware.shape: a100-80gb-1 ($3.67 an hour, " in said
    share = made(12_000, "a100-80gb-1")[1].binding.share
    assert f"{1 - share:.0%} to spare)" in said


@pytest.mark.parametrize("length", [1024, 8192])
def test_what_fits_well_has_no_advice(length):
    _, plan = made(length)
    assert plan.verdict == "fits"
    assert advice(plan) == []
