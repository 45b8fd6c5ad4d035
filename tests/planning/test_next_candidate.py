"""Tests of the plan's next candidate after a run that was out of GPU memory."""

import pytest

from flytune.planning import planner
from flytune.recipe import Recipe
from tests.support.recipes import content
from tests.support.stages import plan_for


def made(shape, size, accumulation, **hardware):
    recipe = Recipe.model_validate(content(hardware={"shape": shape, **hardware}))
    plan = plan_for(recipe).model_copy(
        update={
            "shape": shape if shape != "auto" else "t4-1",
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": accumulation,
        }
    )
    return recipe, plan


@pytest.mark.parametrize(
    ("size", "accumulation", "then"), [(8, 1, 4), (6, 2, 3), (5, 1, 1), (3, 4, 1), (2, 3, 1)]
)
def test_first_half_the_micro_batch_on_the_same_shape(size, accumulation, then):
    other = planner.next_candidate(*made("auto", size, accumulation))
    assert other.training.per_device_train_batch_size == then
    assert other.hardware.shape == "t4-1"
    assert other.training.global_batch_size == Recipe.model_validate(content()).training.global_batch_size


def test_then_the_next_row_with_more_memory_that_the_recipe_allows():
    other = planner.next_candidate(*made("auto", 1, 8))
    assert other.hardware.shape == "l4-1"
    assert planner.next_candidate(*made("auto", 1, 8, accelerator="T4")).hardware.shape == "t4-8"


def test_a_named_row_has_no_other():
    assert planner.next_candidate(*made("t4-1", 1, 8)) is None


def test_the_run_keeps_its_key_and_the_plan_says_why():
    _, first = made("auto", 8, 1)
    second = first.model_copy(update={"key": "another", "per_device_train_batch_size": 4})
    other = planner.adopted(first, second, "out of GPU memory")
    assert other.key == first.key
    assert other.reasons[-1] == "out of GPU memory on t4-1 with 8 samples a pass; once more on t4-1 with 4"
