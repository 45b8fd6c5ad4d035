"""Tests of what a run is too short for."""

import pytest

from flytune.recipe import Recipe, run_length
from tests.support.plans import plan_of
from tests.support.recipes import content

SCORED = {"eval_steps": 10, "early_stopping_patience": 3}


def notes(steps, samples=None, training=None, **sections):
    section = {"learning_rate": 1e-3, "global_batch_size": 8} | (training or {})
    return run_length.notes(Recipe.model_validate(content(training=section, **sections)), steps, samples)


@pytest.mark.parametrize(
    ("steps", "samples", "given", "said"),
    [
        (
            20,
            None,
            {"training": {"warmup_steps": 500}},
            "training.warmup_steps: 500 is 500 steps of warm-up in a run of 20 steps: the rate rises until "
            "the end, to 3.8% of",
        ),
        (
            20,
            None,
            {"training": {"warmup_steps": 19}},
            "reaches learning_rate in the last step and never decays",
        ),
        (
            20,
            None,
            {"training": {"warmup_steps": 30, "lr_scheduler_type": "constant_with_warmup"}},
            "training.warmup_steps: 30 is 30 steps of warm-up in a run of 20 steps: the rate rises until the "
            "end, to 63.3% of",
        ),
        (
            20,
            None,
            {"training": {"warmup_steps": 500, "lr_scheduler_type": "constant"}},
            "training.warmup_steps: 500 is not used: lr_scheduler_type constant has learning_rate from the "
            "first step on; write constant_with_warmup, or warmup_steps: 0",
        ),
        (
            20,
            None,
            {"training": {"logging_steps": 21}},
            "training.logging_steps: 21 in a run of 20 steps: no loss is logged",
        ),
        (
            20,
            80,
            {"training": {"max_steps": 20, "num_train_epochs": 3}},
            "training.max_steps: ends the run, after 2 epochs; num_train_epochs 3 is not used",
        ),
        (
            20,
            None,
            {"checkpoints": {"save_steps": 20}},
            "checkpoints.save_steps: 20 in a run of 20 steps: nothing is saved",
        ),
        (
            20,
            800,
            {"checkpoints": {"save_steps": "epoch"}, "training": {"max_steps": 20}},
            "checkpoints.save_steps: epoch in a run of 20 steps: nothing is saved before the end",
        ),
        (
            20,
            None,
            {"evaluation": {"eval_steps": 1000}},
            "evaluation.eval_steps: 1,000 in a run of 20 steps: the model is",
        ),
        (
            40,
            None,
            {"evaluation": SCORED},
            "evaluation.early_stopping_patience: 3 in a run of 40 steps, with 3 evaluations before the end: "
            "training cannot",
        ),
        (
            10,
            80,
            {"evaluation": {"eval_steps": 0.5, "early_stopping_patience": 1}},
            "evaluation.early_stopping_patience: 1 in a run of 10 steps, with 1 evaluation before the end",
        ),
        (2, 16, {"evaluation": {"task_shards": 2}}, "evaluation.task_shards: is not used: evaluation.tasks"),
        (2, 16, {"tracking": {"project": "p"}}, "tracking.project: is not used: tracking.report_to names no"),
        (2, 16, {"checkpoints": {"save_total_limit": 3}}, "checkpoints.save_total_limit: is not used: with"),
        (2, 16, {"notify": {"on": ["succeeded"]}}, "notify.on: is not used: no webhook, email or slack"),
        (2, 16, {"notify": {"on": ["succeeded"], "webhook": True}}, None),
        (2, 16, {}, None),
        (20, None, {"training": {"warmup_steps": 18}}, None),
        (20, None, {"training": {"warmup_steps": 0, "lr_scheduler_type": "constant"}}, None),
        (20, None, {"training": {"warmup_steps": 19, "lr_scheduler_type": "constant_with_warmup"}}, None),
        (41, None, {"evaluation": SCORED}, None),
        (20, None, {"checkpoints": {"save_steps": 19}}, None),
        (20, None, {"checkpoints": {"save_steps": "auto"}}, None),
        (20, None, {"checkpoints": {"save_steps": "epoch"}}, None),
        (20, 80, {"checkpoints": {"save_steps": "epoch"}}, None),
        (20, None, {"checkpoints": {"save_steps": 0.5}, "evaluation": {"eval_steps": 0.1}}, None),
    ],
)
def test_what_a_run_is_too_short_for_is_said_and_nothing_else(steps, samples, given, said):
    found = notes(steps, samples, **given)
    assert len(found) == bool(said)
    assert all(said in line for line in found)


def test_the_plan_says_it_where_the_steps_are_known():
    section = {"learning_rate": 1e-3, "global_batch_size": 8, "warmup_steps": 500}
    assert not [line for line in plan_of(training=section).reasons if "warm-up" in line]
    (said,) = (line for line in plan_of(training=section | {"max_steps": 20}).reasons if "warm-up" in line)
    assert "to 3.8% of learning_rate" in said
    constant = section | {"lr_scheduler_type": "constant"}
    assert any("warmup_steps: 500 is not used" in line for line in plan_of(training=constant).reasons)
