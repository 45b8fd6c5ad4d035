"""Optimizers of recipes, compared with what transformers makes of their names."""

import typing

import pytest

from flytune.recipe import OPTIMIZERS, Training
from tests.support.recipes import content, mistakes_of


def test_every_name_is_described():
    assert set(typing.get_args(Training.model_fields["optim"].annotation)) == {"auto", *OPTIMIZERS}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_name_is_what_transformers_makes_of_it(name, tmp_path):
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=str(tmp_path), optim=name, adam_beta1=0.8, adam_beta2=0.7, adam_epsilon=1e-6, use_cpu=True
    )
    made, arguments = Trainer.get_optimizer_cls_and_kwargs(args)
    kind = OPTIMIZERS[name]
    assert made.__module__.startswith(kind.library)
    assert made.__name__.lower() == kind.algorithm
    assert arguments.get("is_paged", False) == kind.paged
    assert arguments.get("optim_bits", 32) == kind.bits
    takes = {"adamw": {"betas", "eps"}, "lion": {"betas"}}.get(kind.algorithm, set())
    assert takes == {"betas", "eps"} & set(arguments)
    assert arguments.get("betas", (0.8, 0.7)) == (0.8, 0.7)


@pytest.mark.parametrize(
    ("optim", "field"), [("lion_8bit", "adam_epsilon"), ("adafactor", "adam_beta1"), ("sgd", "adam_beta2")]
)
def test_arguments_that_an_optimizer_does_not_take_are_refused(optim, field):
    section = {"learning_rate": 1e-4, "global_batch_size": 8, "optim": optim, field: 0.5}
    assert f"training: {field}: no argument of {optim}; leave it out, or use" in mistakes_of(
        content(training=section)
    )
