"""Embedding models of encoders: the vector by objective.pooling, in training, export and plan."""

import json
import math
from pathlib import Path

import pytest

from flytune import caches, data
from flytune.adapters import merging
from flytune.errors import RecipeError
from flytune.evaluation import score
from flytune.export import gate
from flytune.models import vectors
from flytune.planning import planner
from flytune.recipe import DataRequest, Model, Recipe
from flytune.stages import local
from tests.support import objective_runs, ranks
from tests.support.encoders import LACKING, POOLING, write_encoder
from tests.support.queries import plain_loss, write_queries
from tests.support.tiny import tiny_recipe


def recipe_for(inputs, model_type, method="full", sharding="none", **changes) -> Recipe:
    section = {"name": "embed", "negatives": 1, "pooling": POOLING[model_type]}
    changes = {"objective": section, "method": method, "sharding": sharding} | changes
    changes |= LACKING.get(model_type, {})
    changes |= {"hardware.shape": "cpu-1" if sharding == "none" else "cpu-2"}
    return Recipe.model_validate(tiny_recipe(inputs / model_type, inputs / "pairs.jsonl", changes))


@pytest.fixture(scope="session", params=POOLING)
def encoder(request, tmp_path_factory):
    """Return a type, and a folder with a tiny model of it, rows and their prepared data."""
    folder = tmp_path_factory.mktemp("encoder")
    write_queries(folder / "pairs.jsonl", 64)
    write_encoder(folder / request.param, request.param)
    data.prepare(DataRequest.of(recipe_for(folder, request.param), "x"), folder / "dataset")
    return request.param, folder


def _vector(hidden, pooling):
    return hidden.mean(dim=0) if pooling == "mean" else hidden[0]


def _first_step(recipe, inputs):
    """Return the loss of a run's first step and the norm of its gradient, each text run alone."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(recipe.model.name_or_path, dtype=torch.float64)
    stream = data.order.Stream(
        data.load(inputs / "dataset", "train"), recipe.training, data.row_kind("queries")
    )
    texts = []
    for place in range(recipe.training.global_batch_size):
        parts = torch.tensor(stream[place]["input_ids"]).split(list(stream[place]["seq_lengths"]))
        hidden = [model(part.unsqueeze(0)).last_hidden_state[0] for part in parts]
        texts.append(
            [
                (tuple(part.tolist()), _vector(states, recipe.objective.pooling))
                for part, states in zip(parts, hidden, strict=True)
            ]
        )
    loss = plain_loss(texts, recipe.objective.temperature, [len(texts[0][0][1])])
    loss.backward()
    squares = [(parameter.grad**2).sum() for parameter in model.parameters() if parameter.grad is not None]
    return float(loss.detach()), math.sqrt(sum(squares))


def _by_its_files(folder, texts):
    """Return the vectors of texts as the files of sentence-transformers say, by transformers alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    pooling = json.loads((folder / "1_Pooling/config.json").read_text())
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    inputs = [tokenizer(text, return_tensors="pt", return_token_type_ids=False) for text in texts]
    assert all(one_input["input_ids"][0, -1] == tokenizer.sep_token_id for one_input in inputs)
    way = "mean" if pooling["pooling_mode_mean_tokens"] else "cls"
    with torch.no_grad():
        return [_vector(model(**one_input).last_hidden_state[0].double(), way) for one_input in inputs]


def test_it_trains_and_exports_the_vectors_of_its_pooling(encoder, tmp_path):
    model_type, inputs = encoder
    recipe = recipe_for(inputs, model_type)
    loss, norm = ranks.run(1, _first_step, recipe, inputs)
    result = ranks.run(1, objective_runs.fit, recipe, inputs, tmp_path / "out", (2, 2))
    assert result.steps[0].loss == pytest.approx(loss, rel=1e-4)
    assert result.steps[0].grad_norm == pytest.approx(norm, rel=1e-3)
    gate.check_files(recipe, tmp_path / "out", inputs / "dataset")
    metrics = score.score(recipe, tmp_path / "out", inputs / "dataset")
    assert metrics.figures

    rows = data.shards.heldout_rows(inputs / "dataset", 8)
    written = {
        row["query"]: row for row in map(json.loads, (inputs / "pairs.jsonl").read_text().splitlines())
    }
    tokenizer = data.stored_tokenizer(inputs / "dataset")
    keys = {tuple(tokenizer(text)["input_ids"]): row for text, row in written.items()}
    of_rows = [keys[tuple(row["input_ids"][: row["seq_lengths"][0]])] for row in rows]
    by_row = [
        [*zip(texts, _by_its_files(tmp_path / "out" / "model", texts), strict=True)]
        for texts in ([row["query"], row["positive"], *row["negatives"]] for row in of_rows)
    ]
    loss = plain_loss(by_row, recipe.objective.temperature, [64])
    assert result.heldout_loss == pytest.approx(float(loss), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["modernbert", "mpnet", "xlm-roberta"], indirect=True)
@pytest.mark.parametrize(
    ("method", "sharding"),
    [
        ("full", "ddp"),
        ("full", "zero2"),
        ("full", "zero3"),
        ("full", "fsdp"),
        ("lora", "fsdp"),
        ("qlora", "ddp"),
    ],
)
def test_every_sharding_has_its_losses(encoder, method, sharding, tmp_path):
    model_type, inputs = encoder
    section = method if method == "full" else {"name": method, "lora_dropout": 0.0}
    objective_runs.check_sharding(
        lambda name: recipe_for(inputs, model_type, section, name), sharding, inputs, tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["xlm-roberta"], indirect=True)
def test_a_merged_adapter_has_its_vectors(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "hub_folder", lambda name: caches.make_folder(tmp_path / "caches" / name))
    monkeypatch.setenv("FLYTUNE_OUT", str(tmp_path / "artifacts"))
    model_type, inputs = encoder
    recipe = recipe_for(inputs, model_type, "lora", **{"training.learning_rate": 1e-2})
    merge = merging.merge(Path(local.run(recipe)), tmp_path / "merged")
    assert merge.candidates[0].divergence < 1e-6
    assert _by_its_files(tmp_path / "merged", ["half of 3"])[0].shape == (64,)


@pytest.mark.parametrize(
    ("model_type", "pooling", "words"),
    [
        ("bert", "last", "is an encoder .bert.*write mean, or cls where its model card says so"),
        ("tiny", "cls", "the first token of a decoder .llama. sees none of the others"),
    ],
)
def test_a_pooling_that_the_base_is_not_made_for_is_refused(model_type, pooling, words, tmp_path):
    if model_type == "bert":
        write_encoder(tmp_path / model_type, model_type)
    else:
        objective_runs.tiny_base(tmp_path)
    write_queries(tmp_path / "pairs.jsonl", 16)
    changes = {"objective": {"name": "embed", "pooling": pooling}, "hardware.shape": "cpu-1"}
    recipe = Recipe.model_validate(
        tiny_recipe(tmp_path / model_type, tmp_path / "pairs.jsonl", changes | {"method": "full"})
    )
    with pytest.raises(RecipeError, match=words):
        planner.make(recipe)


def test_the_plan_knows_how_the_base_makes_its_own_vectors(encoder):
    model_type, inputs = encoder
    assert vectors.published_pooling(Model(name_or_path=str(inputs / model_type))) is None
    files = vectors.companions(recipe_for(inputs, model_type).objective, 64, 32)
    file = inputs / model_type / "1_Pooling" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(files["1_Pooling/config.json"]))
    own = vectors.published_pooling(Model(name_or_path=str(inputs / model_type)))
    assert own == POOLING[model_type]
    section = {"name": "embed", "pooling": "mean" if own == "cls" else "cls"}
    plan = planner.make(recipe_for(inputs, model_type, objective=section))
    assert f"the base's own vectors are by {own}" in " ".join(plan.reasons)
    assert "not among those that were trained in small" not in " ".join(plan.reasons)
