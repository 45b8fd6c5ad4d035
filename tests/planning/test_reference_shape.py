"""Where the reference's log-probabilities are computed, and which kind of reference is told as the cheaper
one."""

import re

import pytest

from flytune.errors import DoesNotFit
from flytune.hardware import shape_named
from flytune.planning import candidates, planner, stage_shapes
from tests.support.plans import GEOMETRY, LLAMA_8B, plan_of, recipe_of
from training_estimates.config_sizes import geometry

DPO = {"objective": "dpo", "method": "lora", "sharding": "ddp", "hardware": {"shape": "a100-80gb-8"}}


def prices(recipe, samples, steps):
    """Return the hours and prices that are told, and the kind that is told to be cheaper."""
    fit = candidates.each(recipe, shape_named("a100-80gb-8"), GEOMETRY)[-1]
    (line,) = stage_shapes.reference_reasons(fit, samples, steps)
    match = re.fullmatch(
        r"reference: computed once on (\S+) it takes (\S+) h, \$(\S+); in each step (\S+) h, \$(\S+): "
        r"cheaper (.*) \(objective.precompute_ref_log_probs\)",
        line,
    )
    return match[1], *map(float, match.group(2, 3, 4, 5)), match[6]


def test_each_pair_is_run_once_before_training_and_once_in_each_epoch():
    recipe = recipe_of(**DPO)
    batch = recipe.training.global_batch_size
    task, before, once, in_steps, each, cheaper = prices(recipe, 1000 * batch, 3000)
    assert cheaper == "before training"
    # A pass forward alone.
    assert (
        in_steps
        < 3000 / 3600 * candidates.each(recipe, shape_named("a100-80gb-8"), GEOMETRY)[-1].time.seconds / 4
    )
    # One GPU at a time, against eight in each of three epochs.
    assert before / in_steps == pytest.approx(8 / 3, rel=0.05)
    assert task == "a100-80gb-1"
    assert once / each == pytest.approx(8 / 3 * 3.673 / 27.45, rel=0.05)
    *_, more, _ = prices(recipe, 1000 * batch, 6000)
    assert more == pytest.approx(2 * each, rel=0.01)


def test_a_run_that_sees_few_of_its_pairs_computes_them_in_its_steps():
    recipe = recipe_of(**DPO)
    *_, cheaper = prices(recipe, 1_000_000 * recipe.training.global_batch_size, 1000)
    assert cheaper == "in each step"


def test_equal_prices_of_one_epoch_are_no_reason_for_a_task_of_its_own():
    recipe, shape = recipe_of(**DPO | {"sharding": "none"}), shape_named("a100-80gb-1")
    fit = candidates.each(recipe, shape, GEOMETRY)[-1]
    (line,) = stage_shapes.reference_reasons(fit, 1000 * recipe.training.global_batch_size - 1, 1000)
    assert line.endswith(": no way is cheaper (objective.precompute_ref_log_probs)")


@pytest.mark.parametrize(
    ("changes", "samples"), [({"objective": "sft"}, 1000), ({"objective": "kto"}, 1000), ({}, None)]
)
def test_nothing_is_compared_where_there_is_no_choice(changes, samples):
    fit = candidates.each(recipe_of(**DPO | changes), shape_named("a100-80gb-8"), GEOMETRY)[-1]
    assert stage_shapes.reference_reasons(fit, samples, 100) == []


def deep(layers, **sizes):
    return geometry(LLAMA_8B | {"num_hidden_layers": layers} | sizes, "a/b")


def test_the_task_gets_the_cheapest_machine_of_the_same_gpu_that_holds_the_model():
    recipe = recipe_of(**DPO)
    plan = plan_of(**DPO)
    assert plan.shape == "a100-80gb-8"
    assert stage_shapes.reference_shape(recipe, plan, GEOMETRY).name == "a100-80gb-1"
    assert stage_shapes.reference_shape(recipe, plan, deep(320)).name == "a100-80gb-8"
    with pytest.raises(DoesNotFit, match="no node with A100-80GB in shapes.yaml holds the reference model"):
        stage_shapes.reference_shape(recipe, plan, deep(2000, intermediate_size=65536))


DISTILL = {"name": "distill", "teacher_model_name_or_path": "Qwen/Qwen2.5-7B-Instruct", "loss_top_k": 64}


@pytest.mark.parametrize(
    ("objective", "samples", "is_counted"),
    [
        (DISTILL, 100_000, True),
        (DISTILL, 10_000_000, False),
        (DISTILL | {"on_policy": 1.0, "max_completion_length": 64}, 100_000, None),
        ("sft", 100_000, None),
    ],
)
def test_the_disk_of_a_node_that_trains_has_the_tokens_of_a_teacher(objective, samples, is_counted):
    recipe = recipe_of(
        objective=objective,
        method="lora",
        sharding="ddp",
        hardware={"shape": "a100-80gb-8"},
        data={"path": "s3://bucket/rows", "packing": False, "max_length": 2048},
        training={"learning_rate": 1e-5, "global_batch_size": 64},
    )
    known, unknown = (planner.make(recipe, geometry=GEOMETRY, samples=count) for count in (samples, None))
    (disk,), (before,) = (
        [need for need in plan.needs if need.resource == "disk"] for plan in (known, unknown)
    )
    size = 2 * samples * 2048 * (8 * 64 + 4)
    assert disk.peak_bytes - before.peak_bytes == (size if is_counted else 0)
    warnings = [
        reason for reason in known.reasons if reason.startswith("warning: the teacher's tokens take up")
    ]
    assert len(warnings) == (is_counted is False)
    assert not warnings or "19,684 GiB on the disk of a node that trains" in warnings[0]
