"""Tokenizers that cannot train are refused before anything is prepared, with the reason and what to do."""

import re

import pytest

from flytune import data
from flytune.data import load_tokenizer
from flytune.errors import DataError
from flytune.recipe import DataRequest, Recipe
from tests.support.spoiled import change
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs


def recipe_for(tmp_path):
    return Recipe.model_validate(tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 8)))


def test_a_tokenizer_that_encodes_no_text_is_damaged(tmp_path):
    recipe = recipe_for(tmp_path)
    change(tmp_path / "tiny" / "tokenizer.json", model={"type": "WordLevel", "vocab": {"a": 4}, "unk_token": "[UNK]"})
    with pytest.raises(DataError, match=r"is damaged: it encodes no text"):
        load_tokenizer(recipe.model, recipe.data)


@pytest.mark.parametrize(("field", "token"), [("pad_token", "<|pad|>"), ("eos_token", "<|im_end|>")])
def test_a_token_without_a_row_in_the_embedding_is_refused_before_training(field, token, tmp_path):
    recipe = recipe_for(tmp_path)
    # The pad token has the last of the ids 0 to 3, the end token the one before.
    rows = {"pad_token": 3, "eos_token": 2}[field]
    changes = {"eos_token": {"pad_token": "<|endoftext|>"}, "pad_token": {}}[field]
    change(tmp_path / "tiny" / "config.json", vocab_size=rows)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=changes)})
    said = f"data.{field}: {token!r} has the id {rows}, and the embedding of {tmp_path / 'tiny'} has {rows} rows; set a token"
    with pytest.raises(DataError, match=re.escape(said)):
        data.prepare(DataRequest.of(recipe, "x"), tmp_path / "dataset")
    assert not (tmp_path / "dataset" / "manifest.json").exists()


@pytest.mark.parametrize(("field", "advice"), [("eos_token", "set data.eos_token"), ("pad_token", "data.pad_token: ")])
def test_an_empty_token_is_none(field, advice, tmp_path):
    recipe = recipe_for(tmp_path)
    change(tmp_path / "tiny" / "tokenizer_config.json", **{field: ""})
    with pytest.raises(DataError, match=rf"has no {'EOS' if field == 'eos_token' else 'pad'} token") as refused:
        load_tokenizer(recipe.model, recipe.data)
    assert advice in str(refused.value)


@pytest.mark.parametrize("text", [{"backend": ["\ud800"]}, {"chat_template": "{{ messages }}\udfff"}])
def test_a_tokenizer_that_could_not_be_stored_is_refused_before_the_rows_are_read(text, tmp_path):
    recipe = recipe_for(tmp_path)
    (tmp_path / "tiny" / "chat_template.jinja").unlink(missing_ok=True)
    change(tmp_path / "tiny" / "tokenizer_config.json", **text)
    with pytest.raises(DataError, match=r"has text that is not Unicode \(surrogates not allowed: '\\ud[8f][0f][0f]'\)"):
        load_tokenizer(recipe.model, recipe.data)
