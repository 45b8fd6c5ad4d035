"""Scalings of the rotary embedding: a tiny model of each type reads those that the table says; they reach
every way of loading, and what is written."""

import json

import pytest

from flytune.errors import RecipeError
from flytune.models import heads, loading, positions, published, rope, sharded_loading
from flytune.recipe import Recipe
from tests.support import model_types
from tests.support.tiny import tiny_base, tiny_recipe

LENGTH = 700
"""Tokens of a sample; the tiny models are made for 512."""
SCALINGS = {
    "linear": {"factor": 4},
    "dynamic": {"factor": 4},
    "yarn": {"factor": 4, "original_max_position_embeddings": 256},
    "llama3": {
        "factor": 4,
        "original_max_position_embeddings": 256,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
    },
    "longrope": {
        "factor": 4,
        "original_max_position_embeddings": 256,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}
POSITIONS = {"linear": 2048, "dynamic": 2048, "yarn": 1024, "llama3": 1024, "longrope": 1024}
QUICK = ("llama", "qwen3", "phi3", "mixtral", "gpt_neox", "gpt2", "granitemoehybrid")


def scaled_by(kind, frequencies=8):
    scaling = {"rope_type": kind, **SCALINGS[kind]}
    lists = {key: value[:1] * frequencies for key, value in scaling.items() if isinstance(value, list)}
    return scaling | lists


def recipe_on(folder, scaling, **changes):
    return Recipe.model_validate(
        tiny_recipe(folder, folder / "rows.jsonl", {"model.rope_scaling": scaling, **changes})
    )


def base_of(folder, **config):
    """Write a tiny Llama that is made for 512 tokens."""
    base = tiny_base(folder)
    content = json.loads((base / "config.json").read_text()) | {"max_position_embeddings": 512} | config
    (base / "config.json").write_text(json.dumps(content))
    return base


def logits_of(model, length=LENGTH):
    import torch

    ids = torch.arange(length)[None] % 100 + 5
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow)
        for kind in sorted({*rope.SCALED, *rope.SCALED_BY, "gpt2", "granitemoehybrid", "gemma3_text"})
    ],
)
def test_a_type_reads_the_scalings_of_the_table_and_no_others(kind, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = model_types.tiny_config(kind)
    if kind in rope.SCALED_BY and hasattr(config, "head_dim"):
        config.head_dim = None  # as published
    if kind == "gpt_oss":
        # Its own scaling makes it one for 131,072 tokens, of which no other may make fewer.
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
        config.max_position_embeddings = 512
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    parameters = getattr(config, "rope_parameters", None) or {}
    read = rope.SCALED_BY.get(kind, SCALINGS if kind in rope.SCALED else ())
    for name in SCALINGS:
        frequencies = rope._frequencies(config, parameters) if kind in rope.SCALED else 8
        model = recipe_on(tmp_path / "base", scaled_by(name, frequencies)).model
        if name not in read:
            with pytest.raises(RecipeError, match=r"model\.rope_scaling: transformers reads no"):
                rope.arguments(model)
            continue
        arguments = rope.arguments(model)
        changed = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **arguments)
        assert (logits_of(changed) - logits_of(plain)).abs().max() > 1e-6, name
        changed.config.save_pretrained(tmp_path / name)
        again = AutoConfig.from_pretrained(tmp_path / name)
        assert {key: getattr(again, key) for key in arguments} == arguments


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_scaling_reaches_every_way_of_loading_and_both_forms_of_config_json(kind, tmp_path):
    from transformers import AutoConfig

    base = base_of(tmp_path)
    recipe = recipe_on(base, scaled_by(kind, 16))
    model = loading.base_model(recipe, "float32")
    assert positions.of_model(model).tokens == POSITIONS[kind]
    expected = logits_of(model)
    plain = loading.base_model(recipe_on(base, None), "float32")
    assert (expected - logits_of(plain)).abs().max() > 1e-4

    sliced = sharded_loading.meta_model(recipe.model, "float32")
    assert sliced.config.rope_parameters == model.config.rope_parameters
    assert sliced.model.rotary_emb.inv_freq.equal(model.model.rotary_emb.original_inv_freq)

    folder = tmp_path / "model"
    model.save_pretrained(folder)
    published.write_config(model.config, recipe.model, "float32", "LlamaForCausalLM", folder)
    content = json.loads((folder / "config.json").read_text())
    assert content["rope_parameters"] == model.config.rope_parameters
    old = content["rope_scaling"]
    assert old.get("rope_type", old.get("type")) == kind
    assert AutoConfig.from_pretrained(folder).rope_parameters == model.config.rope_parameters
    exported = loading.exported_model(recipe, tmp_path)
    assert logits_of(exported).equal(expected)


def test_dynamic_frequencies_follow_from_the_batch_alone(tmp_path):
    model = loading.base_model(recipe_on(base_of(tmp_path), scaled_by("dynamic")), "float32")
    first = [logits_of(model, length) for length in (100, 600)]
    logits_of(model, 900)
    assert all(
        logits_of(model, length).equal(before) for length, before in zip((600, 100), first[::-1], strict=True)
    )


@pytest.mark.parametrize(
    ("config", "scaling", "said"),
    [
        ({}, scaled_by("yarn") | {"factor": 1.5}, "makes 384 positions, less than the 512"),
        ({}, scaled_by("longrope", 5), "have 5 numbers; a head of .* has 16 frequencies"),
        ({"alibi": True}, scaled_by("linear"), "has no rotary embedding"),
    ],
)
def test_a_scaling_that_does_not_suit_its_base_is_refused(config, scaling, said, tmp_path):
    with pytest.raises(RecipeError, match=said):
        rope.arguments(recipe_on(base_of(tmp_path, **config), scaling).model)


def test_code_of_the_models_own_is_not_known_to_read_it(tmp_path):
    recipe = recipe_on(base_of(tmp_path), scaled_by("linear"), **{"model.trust_remote_code": True})
    with pytest.raises(RecipeError, match="write it into the config.json of a copy"):
        rope.scaled({"model_type": "llama"}, recipe.model)


def test_a_reward_model_is_scaled_too(tmp_path):
    recipe = recipe_on(base_of(tmp_path), scaled_by("yarn"), objective="reward")
    model = loading.base_model(recipe, "float32")
    assert heads.has_score(model)
    assert model.config.rope_parameters["rope_type"] == "yarn"


def test_a_prompt_beyond_the_base_is_as_long_as_samples_may_be(tmp_path):
    base = base_of(tmp_path)
    lengths = {128: 0, 512: 0, 520: 520, 2000: 560}
    for length, beyond in lengths.items():
        assert rope.tokens_beyond(recipe_on(base, scaled_by("yarn"), **{"data.max_length": length})) == beyond
    assert rope.tokens_beyond(recipe_on(base, None, **{"data.max_length": 2000})) == 0
