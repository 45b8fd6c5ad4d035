"""Tokens added to the vocabulary: rows of embedding and head in every load, in training, export, merging and
resuming."""

import json
from types import SimpleNamespace

import pytest
import torch

from flytune import data
from flytune.adapters import combining, merging
from flytune.adapters import loading as adapters_loading
from flytune.artifacts import build
from flytune.data import heldout_rows
from flytune.errors import DataError, ExportError, RecipeError
from flytune.export import gate
from flytune.models import initial_adapter, loading, probe, scoring, sharded_loading, vocabulary
from flytune.planning import planner
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import DataRequest, Method, Model, Recipe
from flytune.selftest import tiny_model
from tests.support import ranks
from tests.support.reports import metrics
from tests.support.saved_runs import fit
from tests.support.tiny import tiny_recipe, write_pairs

TOKENS = ["<|turn|>", "<|end_turn|>"]
TEMPLATE = tiny_model.CHATML.replace("<|im_start|>", TOKENS[0]).replace("<|im_end|>", TOKENS[1])
# Equal losses are those of one computation in another order of summation (float32).
SAME = 1e-5


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Two bases without the tokens, head tied and not, and a data set whose chats are written with them."""
    folder = tmp_path_factory.mktemp("vocabulary")
    tokenizer = tiny_model.train_tokenizer(tiny_model.SENTENCES, 500)
    for name in ("tied", "untied"):
        torch.manual_seed(0)
        model = tiny_model.random_model(tokenizer)
        if name == "untied":
            model.config.tie_word_embeddings = False
            model = type(model)(model.config)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write_pairs(folder / "pairs.jsonl", 64)
    (folder / "chat.jinja").write_text(TEMPLATE)
    recipe = recipe_for(folder, "full", "none")
    data.prepare(DataRequest(model=recipe.model, data=recipe.data, fingerprint="x"), folder / "dataset")
    return folder


def recipe_for(inputs, method, sharding, base="tied", **changes):
    method = {"name": method} if isinstance(method, str) else method
    method = method if method["name"] == "full" else {"lora_dropout": 0.0, "r": 8, "lora_alpha": 16} | method
    single = sharding in ("none", "device_map")
    changes = {
        "model.extra_special_tokens": TOKENS,
        "data.chat_template": str(inputs / "chat.jinja"),
        "data.eos_token": TOKENS[1],
        "method": method,
        "sharding": sharding,
        "training.learning_rate": 1e-2,
        "training.global_batch_size": 8,
        "hardware.shape": "cpu-1" if single else "cpu-2",
        **changes,
    }
    return Recipe.model_validate(tiny_recipe(inputs / base, inputs / "pairs.jsonl", changes))


def trained(recipe, inputs, out):
    return ranks.run(planner.make(recipe).world_size, fit, recipe, inputs, out)


@pytest.fixture(scope="module")
def plain(inputs, tmp_path_factory):
    """Runs in one process, by method and base."""
    done = {}

    def run(method, base, **changes):
        key = json.dumps([method, base, changes])
        if key not in done:
            out = tmp_path_factory.mktemp("plain") / "trained"
            recipe = recipe_for(inputs, method, "device_map" if "qlora" in key else "none", base, **changes)
            done[key] = recipe, trained(recipe, inputs, out), out
        return done[key]

    return run


LORA, TABLES = {"name": "lora"}, {"name": "lora", "modules_to_save": ["embed_tokens"]}
SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "base", "sharding"),
    [
        (LORA, "untied", "fsdp"),
        (LORA, "tied", "zero3"),
        pytest.param(LORA, "tied", "fsdp", marks=SLOW),
        pytest.param(LORA, "untied", "zero3", marks=SLOW),
        pytest.param(LORA, "untied", "ddp", marks=SLOW),
        pytest.param(TABLES, "tied", "fsdp", marks=SLOW),
        pytest.param(TABLES, "untied", "zero3", marks=SLOW),
        pytest.param({"name": "full"}, "untied", "fsdp", marks=SLOW),
        pytest.param({"name": "full"}, "tied", "zero3", marks=SLOW),
        pytest.param({"name": "qlora"}, "tied", "fsdp", marks=SLOW),
        pytest.param({"name": "qlora"}, "untied", "zero3", marks=SLOW),
    ],
)
def test_the_rows_train_as_in_one_process_and_the_export_is_what_was_trained(
    method, base, sharding, inputs, plain, tmp_path
):
    _, alone, _ = plain(method, base)
    recipe = recipe_for(inputs, method, sharding, base)
    result = trained(recipe, inputs, tmp_path / "trained")
    assert [step.loss for step in result.steps] == pytest.approx(
        [step.loss for step in alone.steps], abs=SAME
    )
    assert result.trained_parameters == alone.trained_parameters
    passes_gate(recipe, inputs, tmp_path / "trained", result)


def passes_gate(recipe, inputs, out, result):
    rows = heldout_rows(inputs / "dataset", scoring.GATE_SAMPLES)
    model = gate.check(recipe, out, inputs / "dataset", rows, lambda: loading.exported_model(recipe, out))
    nll, tokens = scoring.heldout_loss(model, rows, 0, batch_size=4)
    assert float(nll.sum() / tokens.sum()) == pytest.approx(result.heldout_loss, abs=SAME)
    return model


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_one_process_trains_the_rows_and_their_count_is_the_plans(base, inputs, plain):
    recipe, result, out = plain(LORA, base)
    model = passes_gate(recipe, inputs, out, result)
    (_, embedding), *others = vocabulary.row_layers(model)
    assert len(others) == (base == "untied")
    for layer in (embedding, *(layer for _, layer in others)):
        (delta,), (before,) = layer.trainable_tokens_delta.values(), layer.trainable_tokens_original.values()
        assert (delta - before).abs().amax(dim=1).min() > 1e-3, "both tokens' rows have moved"
    assert result.trained_parameters == planner.make(recipe).trained_parameters


@pytest.mark.slow
@pytest.mark.parametrize("method", [LORA, TABLES], ids=["rows", "tables"])
def test_a_merged_model_is_the_live_one_and_has_the_rows(method, inputs, plain, tmp_path):
    from transformers import AutoModelForCausalLM

    recipe, result, out = plain(method, "untied")
    artifact = build.store(
        recipe, planner.make(recipe), inputs / "dataset", out, metrics(), tmp_path / "artifact"
    )
    made = merging.merge(artifact, tmp_path / "merged")
    assert made.candidates[0].divergence < 1e-9
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.vocab_size % vocabulary.MULTIPLE == 0
    rows = heldout_rows(inputs / "dataset", scoring.GATE_SAMPLES)
    nll, tokens = scoring.heldout_loss(merged, rows, 0, batch_size=4)
    assert float(nll.sum() / tokens.sum()) == pytest.approx(result.heldout_loss, abs=SAME)
    assert vocabulary.load_ids(recipe.model)[0][1] in merged.generation_config.eos_token_id
    # Several adapters share the base with its new rows; combining them would lose what is trained of the
    # tables.
    both = adapters_loading.load({"a": artifact, "b": artifact})
    alone = loading.exported_model(recipe, artifact).eval()
    prompts = probe.tokenized(data.load_tokenizer(recipe.model, recipe.data))[:2]
    both.set_adapter("b")
    for mine, theirs in zip(probe.logits_of(both, prompts), probe.logits_of(alone, prompts), strict=True):
        assert torch.equal(mine[1], theirs[1])
    field = "modules_to_save" if method is TABLES else "trainable_token_indices"
    with pytest.raises(ExportError, match=f"its adapter has {field}, which PEFT does not combine correctly"):
        combining.combine([artifact, artifact], tmp_path / "combined")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding", ["none", *(pytest.param(name, marks=SLOW) for name in ("zero3", "fsdp"))]
)
def test_a_killed_run_resumes_bit_for_bit(sharding, inputs, tmp_path):
    changes = {"checkpoints.save_steps": 1, "checkpoints.folder": str(tmp_path / "calm")}
    method = LORA | {"modules_to_save": ["lm_head"]}
    calm = trained(
        recipe_for(inputs, method, sharding, "untied", **changes), inputs, tmp_path / "undisturbed"
    )
    recipe = recipe_for(
        inputs, method, sharding, "untied", **(changes | {"checkpoints.folder": str(tmp_path / "killed")})
    )
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(planner.make(recipe).world_size, fit, recipe, inputs, tmp_path / "no", 1, 2)
    resumed = trained(recipe, inputs, tmp_path / "resumed")
    assert resumed.resumed_from_step >= 1
    assert resumed.heldout_loss == calm.heldout_loss


@pytest.mark.parametrize(
    ("method", "sharding"),
    [(LORA, "none"), pytest.param(TABLES, "fsdp", marks=SLOW), pytest.param(LORA, "zero3", marks=SLOW)],
)
def test_a_run_starts_from_an_adapter_with_rows(method, sharding, inputs, plain, tmp_path):
    _, before, out = plain(method, "untied")
    further = method | {"adapter": str(out / "adapter")}
    changes = {"training.learning_rate": 1e-8, "training.max_steps": 1, "training.warmup_steps": 0}
    recipe = recipe_for(inputs, further, sharding, "untied", **changes)
    assert trained(recipe, inputs, tmp_path / "again").heldout_loss == pytest.approx(
        before.heldout_loss, abs=SAME
    )
    assert initial_adapter.problems(recipe) == []
    if method is LORA:
        other, said = {"model.extra_special_tokens": []}, "the adapter of method.adapter trains rows of"
    else:
        other, said = (
            {"method": LORA | {"adapter": further["adapter"]}},
            "method.modules_to_save: [], but the adapter",
        )
    changed = Recipe.model_validate(
        recipe_for(inputs, **({"method": further, "sharding": "none", "base": "untied"} | other))
    )
    assert said in initial_adapter.problems(changed)[0]


def test_a_slice_reads_the_rows_that_a_loaded_model_has(inputs):
    recipe = recipe_for(inputs, LORA, "none", "untied")
    whole = loading.base_model(recipe, "bfloat16")
    sliced = sharded_loading.meta_model(recipe.model, "bfloat16")
    sharded_loading.load_weights(sliced, inputs / "untied")
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, sliced.get_parameter(name)), name
    old = read_geometry(recipe.model.model_copy(update={"extra_special_tokens": []})).vocab_size
    new = whole.get_input_embeddings().weight
    assert (
        len(new)
        == whole.config.vocab_size
        == vocabulary.rows_for(old, old + 2)
        == read_geometry(recipe.model).vocab_size
    )
    assert torch.equal(new[old:], new[:old].double().mean(dim=0).to(new).expand(len(new) - old, -1))


def test_padding_of_a_vocabulary_is_used_first():
    assert vocabulary.rows_for(151936, 151671) == 151936
    assert vocabulary.rows_for(32000, 32002) == 32008
    assert vocabulary.rows_for(32008, 32008) == 32008


def test_a_token_that_exists_keeps_its_id(inputs):
    model = Model(name_or_path=str(inputs / "tied"), extra_special_tokens=["<|im_end|>", "<|new|>"])
    ids, count = vocabulary.load_ids(model)
    assert ids == [2, count - 1]


def fields(method, model=None, tied=False, bias=None, rows=10):
    embedding, head = torch.nn.Embedding(rows, 2), torch.nn.Linear(2, rows, bias=bias is not None)
    if tied:
        head.weight = embedding.weight
    built = torch.nn.ModuleDict({"embed_in": embedding, "embed_out": head})
    built.get_input_embeddings, built.get_output_embeddings = lambda: embedding, lambda: head
    built.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=rows))
    model = model or Model(name_or_path="a/b", extra_special_tokens=["x", "y"])
    return vocabulary.peft_fields(Method.model_validate({"name": "lora"} | method), model, built, [8, 9])


def test_rows_are_trained_in_each_table_that_is_not_trained_completely():
    assert fields({}) == {"trainable_token_indices": {"embed_in": [8, 9], "embed_out": [8, 9]}}
    assert fields({"trainable_token_indices": [3, 8]}, tied=True) == {
        "trainable_token_indices": {"embed_in": [3, 8, 9]}
    }
    assert fields({"modules_to_save": ["lm_head"]}) == {
        "modules_to_save": ["embed_out"],
        "trainable_token_indices": {"embed_in": [8, 9]},
    }
    assert fields({"modules_to_save": ["embed_tokens"]}, tied=True) == {
        "modules_to_save": ["embed_in"],
        "ensure_weight_tying": True,
    }
    assert fields({"modules_to_save": ["lm_head"]}, bias=True)["modules_to_save"] == ["embed_out"]


@pytest.mark.parametrize(
    ("method", "model", "said"),
    [
        (
            {"modules_to_save": ["lm_head"]},
            {"tied": True},
            "head and embedding of a/b are one tensor; write embed_tokens",
        ),
        (
            {"trainable_token_indices": [10]},
            {},
            "method.trainable_token_indices: 10: the model has 10 tokens",
        ),
        ({}, {"bias": True}, r"the head of a/b has a bias.*write method.modules_to_save: \[lm_head\]"),
    ],
)
def test_tables_that_cannot_be_trained_so_are_refused(method, model, said):
    with pytest.raises(RecipeError, match=said):
        fields(method, **model)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.extra_special_tokens": ["<a>", "<a>"]}, "a token is listed twice"),
        (
            {"method": {"name": "full", "modules_to_save": ["lm_head"]}},
            "modules_to_save: only for lora and qlora",
        ),
        (
            {
                "method": {
                    "name": "lora",
                    "modules_to_save": ["lm_head"],
                    "target_modules": ["q_proj", "lm_head"],
                }
            },
            "lm_head: has an adapter by target_modules, and is trained itself",
        ),
        ({"method": {"name": "lora", "target_modules": ["lm_head"]}}, "rows of lm_head are trained for"),
    ],
)
def test_recipes_that_contradict_themselves_are_refused(changes, said, inputs):
    with pytest.raises(RecipeError, match=said):
        recipe_for(
            inputs,
            **({"method": "lora", "sharding": "none"} | {k: v for k, v in changes.items() if k == "method"}),
            **{k: v for k, v in changes.items() if k != "method"},
        )


def test_the_tokenizer_of_the_data_has_the_tokens(inputs):
    recipe = recipe_for(inputs, LORA, "none")
    tokenizer = data.load_tokenizer(recipe.model, recipe.data)
    assert (
        tokenizer.eos_token,
        [tokenizer.decode([id_]) for id_ in vocabulary.load_ids(recipe.model)[0]],
    ) == (
        TOKENS[1],
        TOKENS,
    )
    without = recipe.model.model_copy(update={"extra_special_tokens": []})
    with pytest.raises(
        DataError,
        match=r"data\.eos_token: '<\|end_turn\|>' is not one of the tokens .* that model\.extra_special",
    ):
        data.load_tokenizer(without, recipe.data)
