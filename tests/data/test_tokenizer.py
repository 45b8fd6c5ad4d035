"""Tokenizers that cannot train are refused before anything is prepared, with the reason and what to do."""

import json
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
    change(
        tmp_path / "tiny" / "tokenizer.json",
        model={"type": "WordLevel", "vocab": {"a": 4}, "unk_token": "[UNK]"},
    )
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
    said = (
        f"data.{field}: {token!r} has the id {rows}, and the embedding of {tmp_path / 'tiny'} has {rows} "
        "rows; set a token"
    )
    with pytest.raises(DataError, match=re.escape(said)):
        data.prepare(DataRequest.of(recipe, "x"), tmp_path / "dataset")
    assert not (tmp_path / "dataset" / "manifest.json").exists()


def test_an_empty_token_is_none(tmp_path):
    recipe = recipe_for(tmp_path)
    change(tmp_path / "tiny" / "tokenizer_config.json", eos_token="")
    with pytest.raises(DataError, match=r"has no EOS token.*set data\.eos_token"):
        load_tokenizer(recipe.model, recipe.data)


@pytest.mark.parametrize(
    ("token", "is_special", "rows", "pad"),
    [
        ("<|finetune_right_pad_id|>", True, 4, "<|finetune_right_pad_id|>"),
        # Text, the place of an image, and a token without a row in the embedding pad nothing.
        (".padding(", False, 4, "<|im_end|>"),
        ("<|image_pad|>", True, 4, "<|im_end|>"),
        ("<pad>", True, 3, "<|im_end|>"),
    ],
)
def test_a_base_without_a_pad_token_pads_with_its_own_or_its_end_token(
    token, is_special, rows, pad, tmp_path
):
    recipe = recipe_for(tmp_path)
    folder = tmp_path / "tiny"
    change(folder / "tokenizer_config.json", pad_token="")
    change(folder / "config.json", vocab_size=rows)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((folder / name).read_text().replace("<|pad|>", token))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [
        one | {"special": one["special"] and (one["content"] != token or is_special)}
        for one in content["added_tokens"]
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    loaded = load_tokenizer(recipe.model, recipe.data)
    assert loaded.pad_token == pad
    assert pad in loaded.all_special_tokens


@pytest.mark.parametrize("text", [{"backend": ["\ud800"]}, {"chat_template": "{{ messages }}\udfff"}])
def test_a_tokenizer_that_could_not_be_stored_is_refused_before_the_rows_are_read(text, tmp_path):
    recipe = recipe_for(tmp_path)
    (tmp_path / "tiny" / "chat_template.jinja").unlink(missing_ok=True)
    change(tmp_path / "tiny" / "tokenizer_config.json", **text)
    with pytest.raises(
        DataError, match=r"has text that is not Unicode \(surrogates not allowed: '\\ud[8f][0f][0f]'\)"
    ):
        load_tokenizer(recipe.model, recipe.data)
