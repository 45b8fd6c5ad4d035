"""Sequence parallelism (sharding.sequence_parallel): four gloo ranks, of which two share each sample, train
what one process trains, and a killed run goes on with another number; what cannot be divided is refused."""

import shutil
from pathlib import Path

import pytest

from flytune.errors import DoesNotFit, RecipeError
from flytune.hardware import shape_named
from flytune.hardware.accelerators import accelerator_named
from flytune.models import sequence_parallel
from flytune.planning import base_sizes, planner, solving
from flytune.recipe import Recipe
from flytune.selftest.matrix import TOLERANCES, grad_norm_distance, loss_distance, weight_distance
from flytune.selftest.runs import FinishedRun
from flytune.training import loop, step_log
from flytune.training.checkpoints.resume import gathered
from tests.support import ranks
from tests.support.process_kills import kill_once_saved
from tests.support.saved_runs import recipe_for
from tests.support.tiny import tiny_recipe
from training_estimates.kernels import memory_seconds

FOUR = shape_named("cpu-2").model_copy(update={"name": "cpu-4", "processes": 4, "memory_gib": 40})
PLAIN = {"name": "none"}


def recipe_of(inputs, folder, sharding, method, **changes):
    adapter = {} if method == "full" else {"lora_dropout": 0.0}
    changes = {"method": {"name": method, **adapter}, "evaluation.eval_steps": 2, **changes}
    changes["hardware.shape"] = "cpu-1" if sharding == PLAIN else "cpu-4"
    return recipe_for(inputs, sharding, folder, **changes)


def fit(recipe, dataset, out, die_at=None):
    record = step_log.Recorder.record

    def record_and_die(self, step, epoch, logs):
        import torch

        record(self, step, epoch, logs)
        # Parts of a sample have dropout of their own.
        seeds = gathered(torch.initial_seed(), self._trainer.args)
        assert len(set(seeds)) >= recipe.sharding.sequence_parallel
        if step == die_at:
            kill_once_saved(recipe, die_at - 1)

    step_log.Recorder.record = record_and_die
    shape = shape_named("cpu-1") if recipe.sharding.name == "none" else FOUR
    return loop.fit(recipe, planner.make(recipe, [shape]), shape, dataset, out)


def trained(inputs, folder, sharding, method, dataset="dataset", **changes):
    recipe = recipe_of(inputs, folder / "checkpoints", sharding, method, **changes)
    result = ranks.run(1 if sharding == PLAIN else 4, fit, recipe, inputs / dataset, folder / "out")
    return FinishedRun(result, folder / "out" / ("model" if method == "full" else "adapter"))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("fsdp", "lora"),
        ("zero3", "full"),
        *(
            pytest.param(name, method, marks=pytest.mark.slow)
            for name, method in [("fsdp", "full"), ("ddp", "lora"), ("zero2", "full"), ("zero3", "lora")]
        ),
    ],
)
def test_ranks_that_share_samples_train_what_one_process_trains(name, method, inputs, tmp_path):
    changes = {"training.activation_checkpointing": True, "training.per_device_train_batch_size": 2}
    plain = trained(inputs, tmp_path / "plain", PLAIN, method, **changes)
    sharding = {"name": name, "sequence_parallel": 2}
    run = trained(inputs, tmp_path / "divided", sharding, method, **changes)
    distances = {
        "loss": loss_distance(run, plain),
        "grad_norm": grad_norm_distance(run, plain),
        "weights": weight_distance(run, plain, inputs / "tiny"),
    }
    assert {what: distance for what, distance in distances.items() if distance > TOLERANCES[what]} == {}
    scores = [[step.eval_loss for step in one.result.steps if step.eval_loss] for one in (run, plain)]
    assert len(scores[0]) == 2
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert run.result.heldout_loss == pytest.approx(plain.result.heldout_loss, rel=1e-5)
    assert [step.tokens for step in run.result.steps] == [step.tokens for step in plain.result.steps]


@pytest.mark.parametrize("name", ["fsdp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_with_another_number(name, inputs, tmp_path):
    whole = trained(inputs, tmp_path / "whole", {"name": name}, "full")
    kept = {"checkpoints.name": "run"}
    for parts, die_at in ((2, 2), (1, 3), (2, None)):
        sharding = {"name": name, "sequence_parallel": parts}
        recipe = recipe_of(inputs, tmp_path / "kept", sharding, "full", **kept)
        arguments = fit, recipe, inputs / "dataset", tmp_path / f"out-{die_at}", die_at
        if die_at:
            with pytest.raises(ranks.RankFailed, match="signal 9"):
                ranks.run(4, *arguments)
    result = ranks.run(4, *arguments)
    assert result.resumed_from_step == 2
    assert [step.loss for step in result.steps] == pytest.approx(
        [step.loss for step in whole.result.steps], rel=TOLERANCES["loss"]
    )
    shutil.rmtree(tmp_path / "kept")


LARGE = {
    "model.name_or_path": "Qwen/Qwen3-8B",
    "model.revision": "b968826d9c46dd6066d109eabc6255188de91218",
    "model.dtype": "bfloat16",
    "training.global_batch_size": 8,
    "training.activation_checkpointing": True,
    "data.max_length": 4096,
    "hardware.shape": "a100-80gb-8x2",
    "checkpoints.folder": "s3://b/c",
}


MIXTURE = {"model.name_or_path": "Qwen/Qwen3-30B-A3B", "model.revision": None}


def large(parts=2, name="fsdp", **changes):
    sharding = {"name": name, "sequence_parallel": parts}
    return Recipe.model_validate(tiny_recipe(Path("x"), Path("y"), LARGE | {"sharding": sharding} | changes))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"name": "device_map"}, RecipeError, "sequence_parallel: 2 with sharding device_map"),
        ({"name": "auto"}, RecipeError, "sequence_parallel: with auto the plan chooses"),
        ({"parts": 3}, RecipeError, "3 does not divide the 32 heads and 8 key/value heads .* 1, 2, 4, 8"),
        ({"parts": 16}, RecipeError, "16 does not divide the 32 heads and 8 key/value heads"),
        (
            {"parts": 4, "hardware.shape": "cpu-2"},
            DoesNotFit,
            "4 does not divide the 2 processes .* 1, 2",
        ),
        ({"training.global_batch_size": 4}, DoesNotFit, "4 is not a multiple of its 8 groups of 2 processes"),
        ({"objective": {"name": "dpo"}}, RecipeError, "with objective dpo: only sft"),
        ({"training.neftune_noise_alpha": 5.0}, RecipeError, "with training.neftune_noise_alpha"),
        ({"training.torch_compile": True}, RecipeError, "with training.torch_compile"),
        (
            {"model.rope_scaling": {"rope_type": "dynamic", "factor": 2}},
            RecipeError,
            "with a dynamic rotary embedding",
        ),
        (
            {"model.trust_remote_code": True},
            RecipeError,
            r"what one does with Qwen/Qwen3-8B \(code of its own\)",
        ),
        (MIXTURE, RecipeError, "the routers of qwen3_moe .*router_aux_loss_coef: 0"),
        (
            {**MIXTURE, "training.router_aux_loss_coef": 0.1},
            RecipeError,
            "with training.router_aux_loss_coef",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(changes, error, said):
    with pytest.raises(error, match=said):
        planner.make(large(**changes))


def test_a_type_that_was_not_tried_is_refused(monkeypatch):
    monkeypatch.setattr(sequence_parallel, "TYPES", frozenset())
    with pytest.raises(RecipeError, match=r"no test shows .* Qwen/Qwen3-8B \(qwen3\)"):
        planner.make(large())


def test_a_plan_divides_activations_and_adds_the_exchange():
    flash = {"data.max_length": 65536, "model.attn_implementation": "flash_attention_2"}
    # One micro batch of one sample in each.
    one, two = (
        planner.make(large(parts, **flash, **{"training.global_batch_size": 16 // parts})) for parts in (1, 2)
    )
    kept = [plan.needs[0].phases["steady step"]["activations"] for plan in (one, two)]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=0.01)
    assert two.step_seconds["forward"] == pytest.approx(one.step_seconds["forward"] / 2, rel=0.05)
    # 36 layers, 3 passes, of 32,768 positions 40 heads of 128 numbers twice, in 2 bytes: half of them leave,
    # and all are written and read twice.
    moved = 36 * 3 * 32768 * 2 * 40 * 128 * 2
    a100 = accelerator_named("A100-80GB")
    seconds = moved / 2 / (0.8e9 * a100.link_gbs) + memory_seconds(4 * moved, a100)
    exchanged = two.step_seconds["communication"] - one.step_seconds["communication"]
    assert exchanged == pytest.approx(seconds, rel=0.01)


def test_another_sharding_divides_samples_too():
    long = {"data.max_length": 131072, "model.attn_implementation": "flash_attention_2"}
    recipe = large(8, "ddp", **long, **{"hardware.shape": "h100-8"})
    with pytest.raises(DoesNotFit, match=r"sharding: \{name: \w+, sequence_parallel: 8\}"):
        planner.make(recipe)


def test_the_largest_length_says_from_which_one_on_samples_are_divided():
    recipe = large(1, **{"hardware.shape": "h100-8", "model.attn_implementation": "flash_attention_2"})
    geometry = base_sizes.read_geometry(recipe.model)
    answer = solving.solve(recipe, "data.max_length", geometry)
    beyond = large(8, **{"hardware.shape": "h100-8", "model.attn_implementation": "flash_attention_2"})
    longest = solving.solve(beyond, "data.max_length", geometry)
    said = f"from {answer.value + 1:,} tokens on, sharding.sequence_parallel helps: 8 fits {longest.value:,}"
    assert said in solving.described(answer)
    with pytest.raises(DoesNotFit, match=r"it would fit with sharding\.sequence_parallel: 4 \(on h100-8"):
        planner.make(
            recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": 400_000})})
        )
    assert longest.divided == ""
