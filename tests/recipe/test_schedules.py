"""Arguments of learning rate schedules, compared with the functions of transformers that take them."""

import inspect
import typing

import pytest

from flytune.recipe import Recipe, Training, schedules
from tests.support.recipes import content, mistakes_of

NAMES = typing.get_args(Training.model_fields["lr_scheduler_type"].annotation)
EXAMPLES = {
    "cosine": {"num_cycles": 1.5},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"lr_end": 1e-6, "power": 2.0},
    "inverse_sqrt": {"timescale": 5},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-6, "warmup_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 4, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
}


def training(name, arguments, **changes):
    section = {
        "learning_rate": 1e-3,
        "global_batch_size": 8,
        "lr_scheduler_type": name,
        "lr_scheduler_kwargs": arguments,
    }
    return section | changes


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_takes_what_its_function_in_transformers_takes(name):
    import torch
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler

    takes = set(inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[name]).parameters)
    assert set(schedules.SCHEDULES[name]) == takes - {
        "optimizer",
        "num_warmup_steps",
        "num_training_steps",
        "last_epoch",
    }
    section = Recipe.model_validate(
        content(training=training(name, EXAMPLES.get(name, {}), max_steps=10))
    ).training
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=section.learning_rate)
    schedule = get_scheduler(name, optimizer, 2, 10, scheduler_specific_kwargs=section.lr_scheduler_kwargs)
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert max(rates) == pytest.approx(1e-3)
    assert len(set(rates)) > 1 or name == "constant"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        (
            "cosine_with_min_lr",
            {"min_lr_rat": 0.1},
            "min_lr_rat is not an argument of cosine_with_min_lr; did you mean min_lr_rate?",
        ),
        ("linear", {"num_cycles": 2}, "num_cycles is not an argument of linear; it takes none"),
        ("inverse_sqrt", {"x": 2}, "x is not an argument of inverse_sqrt; it takes timescale"),
        (
            "cosine_with_min_lr",
            {},
            "needs one of min_lr (a learning rate) and min_lr_rate (a share of learning_rate)",
        ),
        ("cosine_with_min_lr", {"min_lr": 1e-5, "min_lr_rate": 0.1}, "needs one of min_lr"),
        ("cosine_with_min_lr", {"min_lr": 1e-2}, "min_lr should be below learning_rate, 0.001"),
        (
            "cosine_with_min_lr",
            {"min_lr_rate": 2},
            "min_lr_rate should be a number at least 0 and at most 1; found 2",
        ),
        ("polynomial", {"lr_end": 1e-3}, "lr_end should be below learning_rate"),
        (
            "cosine_with_restarts",
            {"num_cycles": 1.5},
            "num_cycles should be an integer at least 1; found 1.5",
        ),
        ("polynomial", {"power": "two"}, "power should be a number greater than 0; found 'two'"),
        ("warmup_stable_decay", {}, "needs num_decay_steps, the steps of its last phase"),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 1, "decay_type": "cos"},
            "decay_type should be one of linear, cosine, 1-sqrt",
        ),
    ],
)
def test_wrong_arguments_are_mistakes_of_the_recipe(name, arguments, said):
    assert f"training: lr_scheduler_kwargs: {said}" in mistakes_of(
        content(training=training(name, arguments))
    ).replace(f"lr_scheduler_kwargs: {name} ", "lr_scheduler_kwargs: ")


@pytest.mark.parametrize(
    ("arguments", "steps", "fits"),
    [
        ({"num_decay_steps": 8}, 10, True),
        ({"num_decay_steps": 9}, 10, False),
        ({"num_decay_steps": 4, "num_stable_steps": 4}, 10, True),
        ({"num_decay_steps": 4, "num_stable_steps": 3}, 10, False),
    ],
)
def test_the_phases_of_warmup_stable_decay_make_up_the_run(arguments, steps, fits):
    section = training("warmup_stable_decay", arguments, warmup_steps=2)
    assert (Training.model_validate(section).schedule_problem(steps) is None) == fits
    if not fits:
        assert "of decay, and the run has 10 steps; change num_decay_steps" in mistakes_of(
            content(training=section | {"max_steps": steps})
        )


def test_integers_that_became_floats_keep_the_key():
    keys = {
        Recipe.model_validate(
            content(training=training("cosine_with_restarts", {"num_cycles": cycles}))
        ).key()
        for cycles in (3, 3.0)
    }
    assert len(keys) == 1
