"""Embedding models: the loss of a whole optimizer step, vectors, ranks, and what its export must have."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from flytune import caches, data
from flytune.adapters import gguf, merging
from flytune.errors import DataError, ExportError, RecipeError
from flytune.evaluation import score
from flytune.export import folder, gate
from flytune.inference.batch import InferenceModel
from flytune.models import loading, tokenizers, vectors
from flytune.models.scoring import sequences_of
from flytune.objectives import embed, objective_of
from flytune.planning import planner
from flytune.recipe import DataRequest, Embed, Recipe
from flytune.stages import local
from tests.support import objective_runs, ranks
from tests.support.chats import checks_of
from tests.support.queries import plain_loss, write_queries
from tests.support.tiny import tiny_recipe

STAND_IN = Path(__file__).parents[1] / "support/stand_in_gguf_converter.py"
SECTION = {"name": "embed", "negatives": 1, "matryoshka_dims": [32]}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """Return a folder with a tiny base model, rows and their prepared data, with one negative each."""
    return objective_runs.prepare(tmp_path_factory.mktemp("embed"), SECTION, write_queries)


def recipe_for(inputs, method="full", sharding="none", **changes) -> Recipe:
    return objective_runs.recipe_for(inputs, SECTION, method, sharding, **changes)


def section_with(fields):
    return Embed.model_validate({"name": "embed"} | fields)


def _plain_first_step(recipe, inputs):
    """Return the loss of a run's first step and the norm of its gradient, each text run alone."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(recipe.model.name_or_path, dtype=torch.float64)
    rows = data.load(inputs / "dataset", "train")
    stream = data.order.Stream(rows, recipe.training, data.row_kind("queries"))
    texts = []
    for place in range(recipe.training.global_batch_size):
        row, start, parts = stream[place], 0, []
        for length in row["seq_lengths"]:
            ids = row["input_ids"][start : start + length]
            parts.append((tuple(ids), model(torch.tensor([ids])).last_hidden_state[0, -1]))
            start += length
        texts.append(parts)
    section = recipe.objective
    loss = plain_loss(texts, section.temperature, [*section.matryoshka_dims, len(texts[0][0][1])])
    loss.backward()
    squares = [(parameter.grad**2).sum() for parameter in model.parameters() if parameter.grad is not None]
    return float(loss.detach()), math.sqrt(sum(squares))


def test_the_loss_is_that_of_the_whole_step_whatever_the_micro_batch(inputs, tmp_path):
    recipe = recipe_for(inputs)
    loss, norm = ranks.run(1, _plain_first_step, recipe, inputs)
    runs = [
        ranks.run(1, objective_runs.fit, recipe, inputs, tmp_path / str(micro), (micro, 4 // micro))
        for micro in (4, 2, 1)
    ]
    assert runs[0].steps[0].loss == pytest.approx(loss, rel=1e-4)
    assert runs[0].steps[0].grad_norm == pytest.approx(norm, rel=1e-3)
    for run in runs[1:]:
        for name in ("loss", "grad_norm", "accuracy"):
            of_whole, of_parts = ([getattr(step, name) for step in each.steps] for each in (runs[0], run))
            assert of_parts == pytest.approx(of_whole, rel=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize(("method", "sharding"), [("full", "ddp"), ("full", "zero2"), ("lora", "fsdp")])
def test_the_negatives_are_those_of_all_processes(method, sharding, inputs, tmp_path):
    objective_runs.check_sharding(lambda name: recipe_for(inputs, method, name), sharding, inputs, tmp_path)


def _passes(recipe, inputs, out):
    """Train, and return the vectors of all forward passes of the third step, when the adapter has changed."""
    made = []
    original = embed._vectors

    def recorded(*arguments):
        made.append(original(*arguments))
        return made[-1]

    embed._vectors = recorded
    objective_runs.fit(recipe, inputs, out, (2, 2))
    return [vectors_of_pass.detach().tolist() for vectors_of_pass in made[8:12]]


def test_both_passes_have_the_same_dropout(inputs, tmp_path):
    recipe = recipe_for(inputs, "lora", **{"method.lora_dropout": 0.5})
    first, second, first_again, second_again = ranks.run(1, _passes, recipe, inputs, tmp_path / "out")
    assert [first, second] == [first_again, second_again]


def test_texts_that_are_equal_are_no_negatives(monkeypatch):
    import torch

    draw = torch.Generator().manual_seed(0)
    made = torch.randn(5, 3, 8, generator=draw, dtype=torch.float64)
    # Rows 0 and 1 have one query, rows 2 and 3 one document, which is a negative of row 4.
    keys = torch.arange(15).reshape(5, 3)
    keys[1, 0] = keys[0, 0]
    keys[3, 1] = keys[4, 2] = keys[2, 1]
    made[1, 0], made[3, 1], made[4, 2] = made[0, 0], made[2, 1], made[2, 1]
    texts = [
        [(int(key), vector) for key, vector in zip(*row, strict=True)] for row in zip(keys, made, strict=True)
    ]
    section = section_with({"matryoshka_dims": [4]})
    loss, accuracy, gradient = embed.step_gradient(made, keys, section)
    assert float(loss) == pytest.approx(float(plain_loss(texts, 0.05, [4, 8])), rel=1e-6)
    monkeypatch.setattr(vectors, "SIMILARITIES", 20)
    in_blocks = embed.step_gradient(made, keys, section)
    assert float(in_blocks[0]) == pytest.approx(float(loss))
    assert in_blocks[1] == accuracy
    assert in_blocks[2].allclose(gradient)


def test_held_out_queries_are_compared_in_blocks(inputs, monkeypatch):
    # The similarities of 20,000 rows at once would be 6 GiB, and each step of their loss as much again.
    recipe, sizes, left_out = recipe_for(inputs), [], vectors._left_out
    rows = [data.load(inputs / "dataset", "train")[place] for place in range(8)]
    model = vectors.loader("last").from_pretrained(recipe.model.name_or_path)
    of_rows = embed.VectorRows(recipe, rows, tokenizers.load(inputs / "dataset" / "tokenizer"))
    whole = of_rows._values(model, "model")

    def recorded(keys, queries):
        sizes.append(left_out(keys, queries).numel())
        return left_out(keys, queries)

    monkeypatch.setattr(vectors, "_left_out", recorded)
    monkeypatch.setattr(vectors, "SIMILARITIES", 32)
    in_blocks = of_rows._values(model, "model")
    assert {*sizes} == {32}
    assert all(in_blocks[name].tolist() == pytest.approx(values.tolist()) for name, values in whole.items())


def test_equally_near_documents_come_first_and_equal_texts_count_once():
    import torch

    near, far = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    # All vectors are equal: nothing was found.
    same = near.expand(3, 2, 2)
    keys = torch.arange(6).reshape(3, 2)
    assert vectors.ranks(same, keys).tolist() == [3, 3, 3]
    made = torch.stack([torch.stack(row) for row in ([near, far], [far, near], [near + far, near])])
    assert vectors.ranks(made, keys).tolist() == [3, 3, 3]
    # The documents of the last two rows are one text.
    keys[2, 1] = keys[1, 1]
    assert vectors.ranks(made, keys).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("pooling", "padded_right", "padded_left"),
    [("last", [2, 3], [4, 5]), ("mean", [1, 2], [3, 4]), ("cls", [0, 1], [2, 3])],
)
def test_no_padding_is_in_a_vector_whatever_side_it_is_on(pooling, padded_right, padded_left):
    import torch

    model = torch.nn.Module()
    model.pooling = pooling
    hidden = torch.arange(12.0).reshape(2, 3, 2)
    right, left = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert vectors.pooled(model, hidden, right)[0].tolist() == padded_right
    assert vectors.pooled(model, hidden, left)[0].tolist() == padded_left


def _prepared(tmp_path, inputs, rows, **changes):
    """Return the manifest and the stored rows of texts, and the stored tokenizer."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe.model_validate(tiny_recipe(inputs / "tiny", file, changes))
    manifest = data.prepare(DataRequest.of(recipe, "x"), tmp_path / "dataset")
    return (
        manifest,
        list(data.load(tmp_path / "dataset", "train")),
        data.stored_tokenizer(tmp_path / "dataset"),
    )


def test_any_program_that_reads_the_stored_tokenizer_makes_the_tokens_of_training(inputs, tmp_path):
    rows = [
        {"anchor": f"question {place} " * 30, "positive": f"answer {place}", "negative_1": "no"}
        for place in range(8)
    ]
    section = SECTION | {"query_prompt": "search: "}
    manifest, stored, tokenizer = _prepared(
        tmp_path, inputs, rows, **{"objective": section, "data.max_length": 16}
    )
    assert manifest.negatives == 1
    assert manifest.truncated == 8
    texts_of = {}
    for place in range(8):
        texts = [f"search: question {place} " + f"question {place} " * 29, f"answer {place}", "no"]
        ids = [tokenizer(text, truncation=True, max_length=16)["input_ids"] for text in texts]
        assert all(text[-1] == tokenizer.eos_token_id for text in ids), "a cut text ends with it too"
        texts_of[tuple(ids[1])] = ids
    assert stored
    for row in stored:
        texts = [list(sequence["input_ids"]) for sequence in sequences_of([row])]
        assert texts == texts_of[tuple(texts[1])]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"query": "a"}, "column positive is missing"),
        ({"query": "a", "positive": " "}, "positive is empty"),
        ({"query": "a", "positive": "b"}, "has 0 negatives, and objective.negatives is 1"),
        ({"query": "a", "positive": "b", "negatives": ["b"]}, r"negatives\[0\] is the positive too"),
        ({"query": "a", "positive": "b", "negatives": [3]}, r"negatives\[0\] must be a string"),
    ],
)
def test_rows_that_cannot_be_trained(row, words, inputs, tmp_path):
    with pytest.raises(DataError, match=words):
        _prepared(tmp_path, inputs, [row, row], objective=SECTION)


@pytest.fixture(scope="session")
def run(inputs, tmp_path_factory):
    """Return the recipe of a run with prompts, its result and its folder, the card and the metrics."""
    recipe = recipe_for(inputs, **{"training.learning_rate": 5e-3})
    out = tmp_path_factory.mktemp("run") / "out"
    result = ranks.run(1, objective_runs.fit, recipe, inputs, out)
    metrics = score.score(recipe, out, inputs / "dataset")
    return recipe, result, out, objective_runs.card_of(recipe, result, out, inputs, metrics), metrics


def _by_its_files(folder, texts):
    """Return the vectors of texts as the files of sentence-transformers say, by transformers alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    kinds = [
        module["type"].rpartition(".")[2] for module in json.loads((folder / "modules.json").read_text())
    ]
    pooling = json.loads((folder / "1_Pooling/config.json").read_text())
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    assert kinds == ["Transformer", "Pooling", "Normalize"]
    assert [name for name, value in pooling.items() if value is True] == [
        "pooling_mode_lasttoken",
        "include_prompt",
    ]
    tokenizer.padding_side = "left"
    inputs = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    positions = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp_min(0)
    with torch.no_grad():
        last = model(**inputs, position_ids=positions).last_hidden_state[:, -1].double()
    assert last.shape[1] == pooling["word_embedding_dimension"]
    return torch.nn.functional.normalize(last, dim=1)


def test_its_files_give_the_vectors_that_were_trained(run, inputs):
    recipe, result, out, _, _ = run
    rows = data.shards.heldout_rows(inputs / "dataset", 8)
    tokenizer = data.stored_tokenizer(inputs / "dataset")
    keys = [tuple(row["input_ids"]) for row in sequences_of(rows)]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in keys]
    made = _by_its_files(out / "model", texts)
    by_row = [
        list(zip(keys[place :: len(rows)], made[place :: len(rows)], strict=True)) for place in range(8)
    ]
    loss = plain_loss(by_row, recipe.objective.temperature, [32, made.shape[1]])
    assert result.heldout_loss == pytest.approx(float(loss), rel=1e-3)


def test_its_card_computes_the_figure(run, inputs):
    _, _, out, card, metrics = run
    assert 'SentenceTransformer(".", model_kwargs={"dtype": "float32"})' in card
    assert "vllm serve . --runner pooling" in card
    code = card.replace("from sentence_transformers", "# from sentence_transformers")
    printed = ranks.run(1, _run_code, code, out / "model", inputs / "dataset")
    measured = next(figure.tuned.value for figure in metrics.figures if figure.name == "mrr")
    assert float(printed.split()[-1]) == pytest.approx(measured, rel=1e-6)


def _run_code(card, weights, dataset):
    parts = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return objective_runs.run_card(
        "".join(f"```python\n{part}```\n" for part in (parts[0], parts[2])), weights, dataset
    )


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("modules.json", lambda modules: modules[:2], "modules.json: is not what the vectors were trained"),
        (
            "1_Pooling/config.json",
            lambda pooling: pooling | {"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True},
            "1_Pooling/config.json: is not what",
        ),
        ("config_sentence_transformers.json", lambda _: None, "missing or damaged"),
    ],
)
def test_the_gate_refuses_an_export_that_makes_other_vectors(file, change, words, run, inputs, tmp_path):
    recipe, _, out, _, _ = run
    trained = shutil.copytree(out, tmp_path / "out")
    content = change(json.loads((trained / "model" / file).read_text()))
    (trained / "model" / file).write_text("{" if content is None else json.dumps(content))
    with pytest.raises(ExportError, match=words):
        gate.check_files(recipe, trained, inputs / "dataset")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.packing": True}, "pads its rows"),
        ({"data.too_long": "split"}, "one vector for a text, not one for each piece"),
        ({"data.images": True}, "objective: embed trains text alone"),
        ({"data.add_eos_token": False}, "at its end token; remove it"),
        ({"data.add_bos_token": False}, "begins texts as the tokenizer does"),
        ({"data.completion_only_loss": False}, "one loss for a query"),
        ({"data.system_prompt": "Search."}, "has no chats; write query_prompt there"),
        ({"data.format": "preference"}, "leave it out, and map the columns"),
        ({"training.torch_compile": True}, "is not tested with it"),
        ({"training.neftune_noise_alpha": 5.0}, "with other noise each time"),
        ({"training.router_aux_loss_coef": 0.1}, "has no balance loss"),
        ({"training.use_liger_kernel": True}, "are not tested without that"),
        ({"training.global_batch_size": 1}, "the documents of the other rows of its step; write more"),
        ({"objective.matryoshka_dims": [4096]}, "has 128 numbers, which are trained in any case"),
        ({"objective.matryoshka_dims": [8, 8]}, "8 is there twice"),
        ({"sharding": {"name": "ddp", "sequence_parallel": 2}}, "only sft divides its samples"),
        ({"method": "qlora", "sharding": "device_map"}, "its result is on the last GPU"),
        ({"method": {"name": "lora", "adapter": "elsewhere"}}, "has other names of layers; merge it first"),
        ({"method": {"name": "lora", "init_lora_weights": "pissa"}}, "its export as LoRA is not tested"),
        ({"method": {"name": "lora", "target_modules": ["lm_head"]}}, "has neither lm_head nor score"),
        ({"method": {"name": "lora", "modules_to_save": ["embed_tokens"]}}, "tables of tokens beside"),
        (
            {"method": {"name": "lora", "target_modules": r"model\.layers\.0\..*"}},
            "a name of layers: without a head they begin with layers.",
        ),
        ({"evaluation.tasks": ["arc_easy"]}, "an embedding model gives vectors"),
        ({"model.trust_remote_code": True}, "may have no hidden states to take"),
    ],
)
def test_recipes_that_cannot_work(changes, words, inputs):
    changes = (
        {"objective": {"name": "embed"}}
        | changes
        | {"hardware.shape": "cpu-2" if "sharding" in changes else "cpu-1"}
    )
    with pytest.raises(RecipeError, match=words):
        planner.make(Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes)))


def test_a_type_without_known_hidden_states_is_refused(inputs):
    problem = objective_of(recipe_for(inputs)).model_problem("rembert")
    assert "rembert is not one of the types that are known" in problem


def test_the_plan_says_what_a_query_is_compared_with(inputs):
    plan = planner.make(recipe_for(inputs, **{"training.per_device_train_batch_size": 1}))
    assert "a query is compared with 7 other documents, those of all rows of a step" in " ".join(plan.reasons)


def test_ranks_among_other_numbers_of_documents_are_not_compared(tmp_path):
    content = tiny_recipe(tmp_path / "base", tmp_path / "rows.jsonl", {"objective": "embed"})
    figures = objective_of(Recipe.model_validate(content)).figures()
    assert ["objective.negatives" in figure.scaled_by for figure in figures] == [True] * 4


@pytest.mark.slow
def test_a_merged_adapter_has_the_vectors_and_the_files(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "hub_folder", lambda name: caches.make_folder(tmp_path / "caches" / name))
    monkeypatch.setenv("FLYTUNE_OUT", str(tmp_path / "artifacts"))
    artifact = Path(local.run(recipe_for(inputs, "lora", **{"training.learning_rate": 1e-2})))
    merge = merging.merge(artifact, tmp_path / "merged")
    assert merge.of_vectors
    assert merge.candidates[0].divergence < 1e-6
    assert merge.candidates[0].agreement == 1
    texts = ["which is the sum of 3", "it is the sum"]
    vectors_of_merged = _by_its_files(tmp_path / "merged", texts)
    recipe = Recipe.from_yaml(artifact / "recipe.yaml")
    tokenizer = folder.tokenizer(artifact)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    of_adapter = vectors.of_texts(loading.exported_model(recipe, artifact), ids, 0)
    cosines = (vectors_of_merged * of_adapter / of_adapter.norm(dim=1, keepdim=True)).sum(dim=1)
    assert cosines.tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
    # Neither has a head of words, which transformers would draw at random.
    for place in (artifact, tmp_path / "merged"):
        with pytest.raises(ExportError, match="an embedding model, which has no head of words"):
            InferenceModel(place, {})
        with pytest.raises(ExportError, match="an embedding model, which has no head of words"):
            gguf.convert(place, tmp_path / "x.gguf", converter=str(STAND_IN))


@pytest.mark.parametrize("column", ["negatives", "negative_1", "hard_negative"])
def test_negatives_that_are_not_read_are_said(column, inputs, tmp_path):
    rows = [{"query": f"q{place}", "positive": f"a{place}", column: f"b{place}"} for place in range(8)]
    _prepared(tmp_path, inputs, rows, objective=SECTION | {"negatives": 0})
    check = checks_of(tmp_path / "dataset")["left out"]
    assert (check.verdict, check.count) == ("warning", 8)
    assert "as objective.negatives says" in check.advice
