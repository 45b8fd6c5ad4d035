"""hardware.headroom: the share of GPU memory that a plan leaves free."""

import pytest

from flytune.errors import DoesNotFit
from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.records.plan import TIGHT
from tests.support.plans import GEOMETRY, recipe_of

SHAPE = shape_named("l4-1")


def made(headroom, length=4096, batch=64):
    training = {"learning_rate": 1e-4, "global_batch_size": batch}
    hardware = {} if headroom is None else {"headroom": headroom}
    recipe = recipe_of(
        method="qlora", training=training, data={"path": "x.jsonl", "max_length": length}, hardware={"shape": "l4-1"} | hardware
    )
    return planner.make(recipe, [SHAPE], GEOMETRY)


def test_the_micro_batch_is_the_largest_that_leaves_the_headroom():
    usual, more, less = made(None), made(0.4), made(0.02)
    assert usual.memory.share <= TIGHT
    assert more.memory.share <= 0.6
    assert less.memory.share <= 0.98
    sizes = [plan.per_device_train_batch_size for plan in (more, usual, less)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1]
    # Twice as much would not leave it.
    doubled = made(0.02).memory.share if sizes[2] == 64 else None
    assert doubled is None or doubled <= 0.98


def test_what_leaves_too_little_is_refused_in_its_words():
    usual = made(None, length=8192, batch=1)
    free = 1 - usual.memory.share
    with pytest.raises(DoesNotFit, match=r"of GPU memory for hardware.headroom 0\.\d+ missing: needs"):
        made(round(free + 0.01, 4), length=8192, batch=1)
    assert made(round(free - 0.01, 4), length=8192, batch=1).memory == usual.memory


def test_headroom_changes_no_key_and_stays_with_a_named_shape():
    plain, wish = recipe_of(), recipe_of(hardware={"headroom": 0.2})
    assert planner.on_shape(wish, "l4-1").hardware.headroom == 0.2
    assert plain.key() == Recipe.model_validate(plain.model_dump()).key()
    assert "headroom" not in str(plain.model_dump(exclude_defaults=True))
