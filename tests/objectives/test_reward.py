"""Reward models of a tiny base: equal to TRL's own trainer, exact after a kill, and the same when
reloaded."""

import json
import shutil
from pathlib import Path

import pytest

from flytune import data
from flytune.errors import DoesNotFit, RecipeError
from flytune.evaluation import score
from flytune.export import gate
from flytune.files import sha256_of
from flytune.models import heads, loading
from flytune.objectives import objective_of
from flytune.planning import planner
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import Recipe
from flytune.records import Metrics
from tests.support import objective_runs, ranks
from tests.support.objective_runs import fit
from tests.support.preferences import write_preferences
from tests.support.tiny import tiny_recipe


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    return objective_runs.prepare(tmp_path_factory.mktemp("rewards"), "reward", write_preferences)


def recipe_for(inputs, *arguments, **changes):
    return objective_runs.recipe_for(inputs, "reward", *arguments, **changes)


def losses_of_trl(recipe, rows, out):
    from peft import LoraConfig
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    def config(objective, **arguments):
        return RewardConfig(center_rewards_coefficient=objective.center_rewards_coefficient, **arguments)

    def load(recipe):
        folder, method = recipe.model.name_or_path, recipe.method
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32", num_labels=1)
        # TRL leaves the head to the random numbers of loading; both start with the same one here.
        model.score.weight.data = heads.drawn(model, recipe.training.seed)["score.weight"].values()
        if method.name == "full":
            return model, None
        own = {"target_modules": "all-linear", "task_type": "SEQ_CLS", "modules_to_save": ["score"]}
        return model, LoraConfig(r=method.r, lora_alpha=method.lora_alpha, lora_dropout=0.0, **own)

    return [
        entry["loss"] for entry in objective_runs.logs_of_trl(config, RewardTrainer, recipe, rows, out, load)
    ]


@pytest.mark.parametrize(
    ("method", "objective"), [("full", {}), ("lora", {}), ("lora", {"center_rewards_coefficient": 0.01})]
)
def test_a_run_computes_what_trl_does(method, objective, inputs, tmp_path):
    recipe = recipe_for(inputs, method, objective={"name": "reward", **objective})
    objective_runs.check_losses(recipe, inputs, tmp_path, fit, losses_of_trl)


@pytest.mark.parametrize(
    ("method", "sharding"), [("full", "none"), pytest.param("lora", "fsdp", marks=pytest.mark.slow)]
)
def test_a_killed_run_resumes_exactly(method, sharding, inputs, tmp_path):
    changes = {"objective": "reward", "method": method if method == "full" else {"name": method}}
    objective_runs.check_resume(inputs, sharding, tmp_path, **changes)


@pytest.fixture(scope="module", params=["full", "lora"])
def tuned(request, inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("tuned") / "out"
    recipe = recipe_for(inputs, request.param, **{"training.max_steps": 12, "training.learning_rate": 3e-3})
    return recipe, ranks.run(1, fit, recipe, inputs, out), out


def scored(recipe, out, inputs):
    return score.score(recipe, out, inputs / "dataset")


@pytest.mark.slow
def test_the_reloaded_model_chooses_held_out_pairs_as_its_card_says(tuned, inputs):
    recipe, result, out = tuned
    metrics = ranks.run(1, scored, recipe, out, inputs)
    accuracy, loss, margin = metrics.figures
    assert metrics.samples == min(8, data.read_manifest(inputs / "dataset").heldout.samples)
    assert accuracy.tuned.value > 0.5
    assert margin.tuned.low < margin.tuned.value < margin.tuned.high
    assert loss.tuned.value == pytest.approx(result.heldout_loss, abs=1e-4), "as the live model's"
    assert metrics.is_better == (accuracy.tuned.low > 0.5)
    assert "perplexity" not in metrics.model_dump_json()
    assert {figure.base for figure in metrics.figures} == {None}, "the base has no head"
    assert {step.reward_margin is None for step in result.steps} == {False}
    assert not metrics.answers
    assert Metrics.model_validate_json(metrics.model_dump_json()) == metrics
    weights = loading.weights_folder(out)
    if recipe.method.name == "full":
        config = json.loads((weights / "config.json").read_text())
        assert config["architectures"] == ["LlamaForSequenceClassification"]
        assert not (weights / "generation_config.json").exists()
    else:
        assert json.loads((weights / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    card = objective_runs.card_of(recipe, result, out, inputs, metrics)
    assert "perplexity" not in card.lower()
    printed = ranks.run(1, objective_runs.run_card, card, weights, inputs / "dataset")
    assert float(printed.split()[-1]) == pytest.approx(accuracy.tuned.value)


def check(recipe, out, inputs):
    rows = data.heldout_rows(inputs / "dataset", 8)
    gate.check(recipe, out, inputs / "dataset", rows, lambda: loading.exported_model(recipe, out))


def test_the_gate_refuses_another_head(tuned, inputs, tmp_path):
    from safetensors.numpy import load_file, save_file

    recipe, _, out = tuned
    copy = tmp_path / "out"
    shutil.copytree(out, copy)
    [file] = loading.weights_folder(copy).glob("*.safetensors")
    tensors = load_file(file)
    [head] = [name for name in tensors if name.endswith("score.weight")]
    tensors[head] = tensors[head] * 1.01
    save_file(tensors, file, metadata={"format": "pt"})
    export = json.loads((copy / "export.json").read_text())
    for one in export["files"]:
        if one["file"] == file.name:
            one["sha256"] = sha256_of(file)
            one["size"] = file.stat().st_size
    (copy / "export.json").write_text(json.dumps(export))
    with pytest.raises(ranks.RankFailed, match="what was exported is not what was trained"):
        ranks.run(1, check, recipe, copy, inputs)
    ranks.run(1, check, recipe, out, inputs)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": {"name": "lora", "adapter": "elsewhere"}}, "has no head of rewards; merge it first"),
        ({"method": {"name": "lora", "init_lora_weights": "pissa"}}, "its export as LoRA is not tested"),
        (
            {"method": {"name": "lora", "modules_to_save": ["embed_tokens"]}},
            "with method.modules_to_save: tables of tokens",
        ),
        ({"method": {"name": "lora", "target_modules": ["lm_head"]}}, "there is no lm_head"),
        ({"method": "qlora", "sharding": "device_map"}, "its result is on the last GPU"),
        ({"evaluation.tasks": ["arc_easy"]}, "a reward model gives a number"),
    ],
)
def test_what_is_not_built_is_refused_with_the_reason(changes, said, inputs):
    recipe = Recipe.model_validate(
        tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", {"objective": "reward"} | changes)
    )
    assert [problem for problem in objective_of(recipe).problems() if said in problem]
    with pytest.raises((RecipeError, DoesNotFit), match="objective: reward with"):
        planner.make(recipe)


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (
            {"name": "reward", "beta": 0.2},
            "beta: only for name: dpo or kto or grpo or distill, and this is reward",
        ),
        (
            {"name": "dpo", "center_rewards_coefficient": 0.01},
            "center_rewards_coefficient: only for name: reward, and",
        ),
    ],
)
def test_fields_of_another_objective_are_refused(objective, said, inputs):
    with pytest.raises(RecipeError, match=said):
        recipe_for(inputs, objective=objective)


def test_the_listed_types_have_the_usual_classifier():
    import transformers
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES,
    )

    assert not [
        kind
        for kind in heads.TYPES
        if not issubclass(getattr(transformers, NAMES[kind]), GenericForSequenceClassification)
    ]
    assert (
        objective_of(recipe_of_types())
        .model_problem("gpt2")
        .startswith("objective: reward: transformers has no sequence")
    )


def recipe_of_types():
    return Recipe.model_validate(tiny_recipe(Path("base"), Path("pairs.jsonl"), {"objective": "reward"}))


@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_counts_a_head_of_one_output(tied, inputs):
    geometry = planner_geometry(inputs).model_copy(update={"tie_word_embeddings": tied})
    plans = {
        name: planner.make(recipe_for(inputs, objective=name), geometry=geometry)
        for name in ("sft", "reward")
    }
    head = 0 if tied else geometry.vocab_size * geometry.hidden_size
    assert plans["reward"].total_parameters == plans["sft"].total_parameters - head + geometry.hidden_size
    memory = {name: plan.needs[0].phases["steady step"] for name, plan in plans.items()}
    assert "reference model" not in memory["reward"]
    # The moment of the loss is no longer the fullest one; its logits were of the vocabulary.
    assert memory["reward"].get("logits and loss", 0) < memory["sft"].get("logits and loss", 1)


def planner_geometry(inputs):
    return read_geometry(recipe_for(inputs).model)
