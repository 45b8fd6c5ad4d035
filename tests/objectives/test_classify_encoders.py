"""Classifiers of encoders: the head of transformers' own class, in training, export and plan."""

import json

import pytest

from flytune import data
from flytune.errors import RecipeError
from flytune.evaluation import score
from flytune.models import heads
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from tests.support import classified, objective_runs, ranks
from tests.support.encoders import LACKING, POOLING, write_encoder
from tests.support.tiny import tiny_recipe

SECTION = {"name": "classify", "labels": classified.LABELS}


def recipe_for(inputs, model_type, method="full", sharding="none", **changes):
    changes = {"objective": SECTION, "method": method, "sharding": sharding} | changes
    changes |= {"hardware.shape": "cpu-1" if sharding == "none" else "cpu-2"} | LACKING.get(model_type, {})
    return Recipe.model_validate(tiny_recipe(inputs / model_type, inputs / "pairs.jsonl", changes))


@pytest.fixture(scope="session", params=POOLING)
def encoder(request, tmp_path_factory):
    """Return a type, and a folder with a tiny model of it, rows and their prepared data."""
    folder = tmp_path_factory.mktemp("encoder")
    classified.write_classified(folder / "pairs.jsonl", 64)
    write_encoder(folder / request.param, request.param)
    data.prepare(DataRequest.of(recipe_for(folder, request.param), "x"), folder / "dataset")
    return request.param, folder


def _by_its_files(folder, texts):
    """Return the logits of texts by transformers alone, float64 (texts, labels)."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    inputs = [tokenizer(text, return_tensors="pt", return_token_type_ids=False) for text in texts]
    with torch.no_grad():
        return torch.cat([model(**text).logits.double() for text in inputs])


def test_a_run_computes_and_exports_what_transformers_does(encoder, tmp_path):
    import torch

    model_type, inputs = encoder
    recipe = recipe_for(inputs, model_type)
    ours = ranks.run(1, objective_runs.fit, recipe, inputs, tmp_path / "out")
    theirs = ranks.run(1, classified.logs_of_transformers, recipe, inputs, tmp_path / "theirs")
    assert [step.loss for step in ours.steps] == pytest.approx([loss for loss, _ in theirs], rel=1e-4)
    assert [step.grad_norm for step in ours.steps] == pytest.approx([norm for _, norm in theirs], rel=1e-3)
    assert score.score(recipe, tmp_path / "out", inputs / "dataset").figures

    rows = [json.loads(line) for line in (inputs / "pairs.jsonl").read_text().splitlines()]
    tokenizer = data.stored_tokenizer(inputs / "dataset")
    by_tokens = {tuple(tokenizer(row["text"])["input_ids"]): row for row in rows}
    heldout = [by_tokens[tuple(row["input_ids"])] for row in data.heldout_rows(inputs / "dataset", 8)]
    logits = _by_its_files(tmp_path / "out" / "model", [row["text"] for row in heldout])
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([row["label"] for row in heldout]))
    assert ours.heldout_loss == pytest.approx(float(loss), rel=1e-4)


def _trained_parameters(recipe):
    from flytune.models import loading

    model = loading.base_model(recipe, "float32")
    assert heads.has_score(model)
    if recipe.method.name == "full":
        return sum(parameter.numel() for parameter in model.parameters())
    from peft import get_peft_model

    model = get_peft_model(model, loading.peft_config(recipe, model))
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    modules = heads.modules_of(model.get_base_model())
    assert not [name for name in trained if "lora_" in name and set(modules) & set(name.split("."))]
    return sum(parameter.numel() for parameter in trained.values())


QUERY = {"distilbert": "q_lin", "modernbert": "Wqkv", "mpnet": "q", "deberta-v2": "query_proj"}
"""Layer of attention by type; query of the others."""


@pytest.mark.parametrize("method", ["full", "lora", "dense"])
def test_the_plan_counts_its_head(encoder, method):
    model_type, inputs = encoder
    if method == "dense":
        # Layers of the head have the name too.
        named = [QUERY.get(model_type, "query")] + ["dense"] * (
            model_type not in ("distilbert", "modernbert")
        )
        method = {"name": "lora", "target_modules": named}
    recipe = recipe_for(inputs, model_type, method)
    assert planner.make(recipe).trained_parameters == _trained_parameters(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["bert", "deberta-v2", "modernbert", "mpnet"], indirect=True)
@pytest.mark.parametrize(
    ("method", "sharding"), [("full", "ddp"), ("full", "zero3"), ("full", "fsdp"), ("lora", "fsdp")]
)
def test_every_sharding_has_its_losses(encoder, method, sharding, tmp_path):
    model_type, inputs = encoder
    section = method if method == "full" else {"name": method, "lora_dropout": 0.0}
    objective_runs.check_sharding(
        lambda name: recipe_for(inputs, model_type, section, name), sharding, inputs, tmp_path
    )


@pytest.mark.parametrize("encoder", ["roberta"], indirect=True)
def test_a_text_that_is_cut_keeps_the_end_token_of_its_tokenizer(encoder, tmp_path):
    model_type, inputs = encoder
    recipe = recipe_for(inputs, model_type, **{"data.max_length": 24, "data.too_long": "truncate"})
    data.prepare(DataRequest.of(recipe, "x"), tmp_path / "dataset")
    tokenizer = data.stored_tokenizer(tmp_path / "dataset")
    texts = [json.loads(line)["text"] for line in (inputs / "pairs.jsonl").read_text().splitlines()]
    expected = {tuple(tokenizer(text, max_length=24, truncation=True)["input_ids"]) for text in texts}
    stored = {tuple(ids) for ids in data.load(tmp_path / "dataset", "train")["input_ids"]}
    assert stored <= expected
    assert max(map(len, stored)) == 24


@pytest.mark.parametrize("encoder", ["bert"], indirect=True)
def test_qlora_is_refused(encoder):
    model_type, inputs = encoder
    with pytest.raises(RecipeError, match="qlora with objective classify on an encoder .bert.*use method"):
        planner.make(recipe_for(inputs, model_type, "qlora"))
