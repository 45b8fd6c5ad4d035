"""Tests of the switch for Liger's kernels; the kernels themselves need a GPU (tests/gpu)."""

import pytest

from flytune.errors import FlytuneError, RecipeError
from flytune.hardware import shape_named
from flytune.objectives.bound import BoundRecipe
from flytune.planning import planner, workloads
from flytune.training import trainer
from tests.support.plans import GEOMETRY, SMALL, TRAINING, plan_of, recipe_of, workload_of
from training_estimates import activations, model_states

LIGER = TRAINING | {"use_liger_kernel": True}


def time_of(work):
    return workloads.time_of(work, shape_named("h100-8"), model_states.of(work))


def test_the_plan_counts_fused_norms_and_less_time():
    plain, fused = (
        workload_of(recipe_of(training=training, method="lora")) for training in (TRAINING, LIGER)
    )
    hidden, layers = GEOMETRY.hidden_size, 2 * plain.tokens
    assert activations.count(plain).kept - activations.count(fused).kept == layers * (4 - 2) * hidden
    assert time_of(fused).kernels < time_of(plain).kernels


def test_adapters_are_not_fused():
    plain, fused = (
        workload_of(recipe_of(training=training, method="lora")) for training in (TRAINING, LIGER)
    )
    assert time_of(fused).adapters == time_of(plain).adapters > 0


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (
            {"model_type": "phi"},
            {},
            "use_liger_kernel: it has no kernels for phi, and would change nothing; leave it out",
        ),
        (
            {},
            {"model": {"name_or_path": "a/b", "trust_remote_code": True}},
            "use_liger_kernel: the model has code of its own",
        ),
        (
            {},
            {"hardware": {"shape": "cpu-1"}, "sharding": "none"},
            "use_liger_kernel: Liger's kernels need a GPU",
        ),
        (
            {},
            {"method": "qlora", "sharding": "device_map", "hardware": {"shape": "h100-8"}},
            "its kernels run on one GPU of a process, and device_map has 8",
        ),
    ],
)
def test_what_it_cannot_speed_up_is_refused(config, changes, said):
    with pytest.raises(FlytuneError, match=said):
        plan_of(SMALL | config, **{"training": LIGER} | changes)


def test_one_kind_of_kernels_is_chosen():
    with pytest.raises(
        RecipeError, match="torch_compile makes kernels of its own for these layers; set one of them"
    ):
        recipe_of(training=LIGER | {"torch_compile": True})


def test_a_training_image_without_them_is_named(tmp_path):
    recipe = recipe_of(training=LIGER, method="lora")
    plan = planner.make(recipe, geometry=GEOMETRY)
    with pytest.raises(
        RecipeError, match=r"liger-kernel is not installed where training runs; build the training image"
    ):
        trainer.arguments(BoundRecipe(recipe), plan, shape_named(plan.shape), tmp_path)
