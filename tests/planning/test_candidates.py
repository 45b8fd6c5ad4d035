"""Settings that a model type does not have are refused by the plan, before a GPU is there, by their keys."""

import json

import pytest

from flytune.errors import RecipeError
from flytune.models import model_types
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.records.plan import STEP
from tests.support.model_types import tiny_config
from tests.support.tiny import tiny_recipe


def plan(folder, model_type, config=None, **changes):
    content = json.loads(tiny_config(model_type).to_json_string()) | (config or {})
    (folder / "config.json").write_text(json.dumps(content))
    defaults = {"model.attn_implementation": "sdpa", "training.activation_checkpointing": True}
    return planner.make(Recipe.model_validate(tiny_recipe(folder, folder / "rows.jsonl", defaults | changes)))


def refusal(folder, model_type, config=None, **changes):
    with pytest.raises(RecipeError) as raised:
        plan(folder, model_type, config, **changes)
    return str(raised.value)


CHECKPOINTS = "training.activation_checkpointing"
FEW = {"n_positions": 64, "max_position_embeddings": 64}
POSITIONS = (
    "data.max_length: 128 tokens, but {folder} ({kind}) has 64 positions, and fails on a longer sample"
)


@pytest.mark.parametrize(
    ("kind", "config", "wrong", "right", "said"),
    [
        (
            "ctrl",
            {},
            {},
            {CHECKPOINTS: False},
            f"{CHECKPOINTS}: transformers has no activation checkpointing for ctrl; set {CHECKPOINTS}: false",
        ),
        (
            "gemma2",
            {},
            {},
            {"model.attn_implementation": "eager"},
            "model.attn_implementation: sdpa: transformers has no such attention for gemma2; set eager or "
            "flash_attention_2",
        ),
        (
            "dbrx",
            {},
            {"model.dtype": "bfloat16"},
            {},
            "model.dtype: dbrx does not compute in 16 bits (RuntimeError: index_add_(): self (Float) and "
            "source",
        ),
        ("gpt2", FEW, {}, {"data.max_length": 64}, POSITIONS),
        ("opt", FEW, {}, {"data.max_length": 64}, POSITIONS),
    ],
)
def test_what_a_type_cannot_do_is_refused_by_its_key_and_planned_without_it(
    kind, config, wrong, right, said, tmp_path
):
    assert said.replace("{folder}", str(tmp_path)).replace("{kind}", kind) in refusal(
        tmp_path, kind, config, **wrong
    )
    plan(tmp_path, kind, config, **right)


def positions_of(*arguments, **changes):
    return [line for line in plan(*arguments, **changes).reasons if line.startswith("positions: ")]


def test_a_scaling_that_a_type_does_not_read_is_refused(tmp_path):
    scaling = {"model.rope_scaling": {"rope_type": "linear", "factor": 2}, "data.max_length": 64}
    said = refusal(tmp_path, "gpt2", FEW, **scaling)
    assert "model.rope_scaling: transformers reads none for gpt2" in said


def test_more_tokens_than_a_base_was_made_for_are_a_line_of_the_plan(tmp_path):
    few = {"max_position_embeddings": 64}
    (said,) = positions_of(tmp_path, "llama", few)
    assert said.startswith("positions: data.max_length 128 is 2 times the 64 that the base was made for")
    scaling = {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 64}
    assert f"model.rope_scaling: {{{', '.join(f'{key}: {value}' for key, value in scaling.items())}}}" in said
    (said,) = positions_of(tmp_path, "llama", few, **{"model.rope_scaling": scaling})
    assert said == "positions: model.rope_scaling (yarn, factor 2) makes 128 of the base's"
    dynamic = {"model.rope_scaling": {"rope_type": "dynamic", "factor": 1.5}}
    first, second = positions_of(tmp_path, "llama", few, **dynamic)
    assert "another micro batch has other losses" in first
    assert "1.33 times the 96 that" in second
    assert second.endswith("or write a factor of 2")
    own = few | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 1.5}}
    (said,) = positions_of(tmp_path, "llama", own)
    assert said.endswith("scale them further (model.rope_scaling, of the base's own type, linear)")
    (said,) = positions_of(tmp_path, "llama", own, **{"model.rope_scaling": scaling})
    assert said.endswith("replaces the base's own scaling (linear), with which it was trained: write linear")
    scaled = few | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}}
    for config, length in ((few, 64), (scaled, 128)):
        assert not positions_of(tmp_path, "llama", config, **{"data.max_length": length})


def test_a_term_of_the_loss_that_is_not_trained_is_refused(tmp_path):
    said = refusal(tmp_path, "bamba", {"z_loss_coefficient": 0.1})
    assert (
        f"model.name_or_path: {tmp_path}: its config.json has z_loss_coefficient: 0.1, with which the loss"
        in said
    )
    plan(tmp_path, "bamba")


def test_the_plan_says_where_all_logits_are_made_and_counts_them(tmp_path):
    one, tokens = {"training.per_device_train_batch_size": 1}, 128
    chunked = plan(tmp_path, "llama", {"vocab_size": 100_000}, **one)
    own = plan(tmp_path, "llama", {"vocab_size": 100_000, "logit_scale": 0.5}, **one)
    assert not [note for note in chunked.reasons if note.startswith("loss:")]
    assert (
        "loss: of all logits of the model, which take memory: TRL's chunked loss leaves out logit_scale: 0.5"
        in own.reasons
    )
    more, less = (plan.needs[0].phases[STEP]["logits and loss"] for plan in (own, chunked))
    assert more - less == pytest.approx(8 * tokens * 100_000, rel=0.01)


@pytest.mark.parametrize(
    "model_type", [name for name, row in model_types.table().items() if "full" not in row["problems"]]
)
def test_each_trained_type_is_planned_or_refused_by_a_key_with_the_defaults(model_type, tmp_path):
    row = model_types.table()[model_type]
    has_defaults = "sdpa" in row["attention"] and row.get("checkpointing", True)
    if has_defaults:
        plan(tmp_path, model_type)
        return
    said = refusal(tmp_path, model_type)
    assert ("model.attn_implementation" in said) == ("sdpa" not in row["attention"])
    assert ("training.activation_checkpointing" in said) == (not row.get("checkpointing", True))
