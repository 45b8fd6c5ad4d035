"""Plans of answers that the model draws: memory, time, a larger batch, and what is not modelled."""

import re

import pytest

from flytune.errors import RecipeError
from flytune.hardware import accelerator_named, shape_named
from flytune.planning import candidates, drawn, planner
from flytune.records.plan import DRAW, EVALUATE, STEP
from tests.support.plans import GEOMETRY, recipe_of
from training_estimates import decoding

GRPO = {"name": "grpo", "group_size": 8, "max_completion_length": 512}


def recipe(objective=GRPO, **changes):
    content = {
        "method": "lora",
        "sharding": "ddp",
        "hardware": {"shape": "a100-80gb-8"},
        "data": {"max_length": 1024},
    }
    data = {"dataset_name": "a/b"} | (changes.pop("data", None) or content["data"])
    training = {"learning_rate": 1e-5, "global_batch_size": 256, "max_steps": 100} | changes.pop(
        "training", {}
    )
    return recipe_of(**content | changes | {"objective": objective, "data": data, "training": training})


def fit_of(one, micro_batch=None, geometry=GEOMETRY):
    fits = candidates.each(one, shape_named(one.hardware.shape), geometry)
    return next(fit for fit in fits if micro_batch in (None, fit.workload.micro_batch))


def test_drawing_is_a_phase_of_its_own_and_part_of_a_step_s_time():
    fit = fit_of(recipe(), micro_batch=4)
    phases = fit.needs[0].phases
    # Keys and values, 32 layers, 8 heads of 128, 16 bits, 1,024 tokens of four answers; those of a layer
    # twice.
    assert phases[DRAW]["KV cache"] == 2 * (32 + 1) * 8 * 128 * 2 * 1024 * 4
    assert phases[DRAW]["weights"] == phases[STEP]["weights"]
    assert "KV cache" not in phases[STEP]
    # The live model answers held-out prompts, as many at a time as evaluation.batch_size says.
    assert phases[EVALUATE]["KV cache"] == phases[DRAW]["KV cache"] / 4 * fit.recipe.evaluation.batch_size
    plan = planner.plan_of(fit)
    assert plan.step_seconds["drawing"] == fit.time.drawing
    assert plan.hours[1] == pytest.approx(100 / 3600 * fit.time.seconds)
    assert not {"tokens_per_second", "hours", "price"} & {*plan.intervals}
    sft = fit_of(recipe({"name": "sft"}), micro_batch=4)
    assert DRAW not in sft.needs[0].phases
    assert fit.time.seconds - fit.time.drawing == pytest.approx(sft.time.seconds)


def test_time_grows_with_tokens_and_falls_with_the_answers_that_are_drawn_at_a_time():
    short, long = (
        fit_of(recipe(GRPO | {"max_completion_length": tokens}), 4).time.drawing for tokens in (128, 512)
    )
    assert 3.5 < long / short < 4.5
    more = fit_of(recipe(GRPO | {"per_device_generation_batch_size": 32}), 4)
    assert more.workload.decoding.at_a_time == 32
    # Reading the weights and starting the kernels of a token take as long for 32 answers as for four.
    assert 5 < long / more.time.drawing <= 8
    (line,) = (
        line for line in planner.plan_of(fit_of(recipe(), 4)).reasons if "generation_batch_size" in line
    )
    assert re.match(
        r"objective.per_device_generation_batch_size: 32 would draw them in \S+ s, with \S+ of 79.2 GiB", line
    )


def test_a_token_reads_all_weights_and_sharded_ones_are_gathered_for_it():
    alone = fit_of(recipe(), 4).workload
    rate = accelerator_named("A100-80GB")
    passes = 32 / 4 * 511
    weights = 2 * (GEOMETRY.parameters - GEOMETRY.vocab_size * GEOMETRY.hidden_size) / (rate.memory_gbs * 1e9)
    assert decoding.seconds(alone, rate) > passes * weights
    sharded = fit_of(recipe(sharding="fsdp"), 4).workload
    gathered = passes * 7 / 8 * 2 * GEOMETRY.parameters / (rate.link_gbs * 1e9)
    assert decoding.seconds(sharded, rate) > max(gathered, decoding.seconds(alone, rate))


def test_answers_that_do_not_fit_the_memory_are_refused_although_their_training_fits():
    one = recipe(
        GRPO | {"max_completion_length": 8000, "per_device_generation_batch_size": 64},
        data={"max_length": 8192},
        training={"global_batch_size": 512, "per_device_train_batch_size": 1},
    )
    said = candidates.best_fit(one, shape_named("a100-80gb-8"), GEOMETRY)
    assert "draw answers; most of it KV cache" in said
    section = one.objective.model_copy(update={"per_device_generation_batch_size": 1})
    fit = candidates.best_fit(
        one.model_copy(update={"objective": section}), shape_named("a100-80gb-8"), GEOMETRY
    )
    assert fit.fits


def test_what_is_not_modelled_is_refused_by_name(tmp_path):
    unknown = GEOMETRY.model_copy(update={"unsupported": "linear attention"})
    with pytest.raises(RecipeError, match="caches keys and values, .* are not modelled for linear attention"):
        planner.make(recipe(), geometry=unknown, trace=lambda *_: "never asked")
    with pytest.raises(RecipeError, match="are drawn by the model, and their lengths are not in the data"):
        drawn.lengths(tmp_path, recipe())
