"""Rows of prompts: their forms, the reference answer, the columns that rewards read, and the check of both."""

import json

import pytest

from flytune import data
from flytune.errors import DataError, RewardError
from flytune.recipe import DataRequest, Recipe
from tests.support.prompts import LETTERS
from tests.support.tiny import tiny_recipe


@pytest.fixture
def stored(base, tmp_path):
    def prepare(rows, objective="grpo", **changes):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = Recipe.model_validate(
            tiny_recipe(base, file, {"objective": objective, "data.heldout_fraction": 0.0} | changes)
        )
        data.prepare(DataRequest.of(recipe, "x"), tmp_path / "dataset", processes=1)
        return data.load(tmp_path / "dataset", "train")

    return prepare


def texts(row, base):
    from transformers import AutoTokenizer

    tokenizer, start = AutoTokenizer.from_pretrained(base), data.rows.prompts.prompt_length(row)
    return tokenizer.decode(row["input_ids"][:start]), tokenizer.decode(row["input_ids"][start:])


@pytest.mark.parametrize(
    ("row", "prompt", "reference"),
    [
        ({"prompt": "1 + 1?\n", "answer": 2}, "1 + 1?\n", "2<|im_end|>"),
        ({"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}, None, "2"),
        ({"question": "1 + 1?", "answer": "So\n#### 2"}, None, "So\n#### 2"),
        ({"prompt": [{"from": "human", "value": "1 + 1?"}], "completion": "It is 2", "answer": "2"}, None, "It is 2"),
    ],
)
def test_a_prompt_is_what_is_before_the_reference_answer(stored, base, row, prompt, reference):
    (found,) = stored([row])
    before, after = texts(found, base)
    assert after.startswith(reference)
    assert before == prompt if prompt else before.endswith("assistant\n") and "1 + 1?" in before
    fields = json.loads(found["fields"])
    assert fields["answer"] == row["answer"]
    assert fields["reference"] in reference
    assert (fields["prompt"] if prompt else fields["prompt"][-1]["content"]).strip() == "1 + 1?"


def test_all_other_columns_are_kept_for_rewards_and_none_is_left_out(stored, tmp_path):
    (row,) = stored([{"prompt": "a?\n", "answer": "1", "tests": ["assert 1"], "schema": {"type": "object"}, "score": 3}])
    fields = json.loads(row["fields"])
    assert (fields["tests"], fields["schema"], fields["score"]) == (["assert 1"], {"type": "object"}, 3)
    assert data.read_manifest(tmp_path / "dataset").left_out == {}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a?"}, "no reference answer"),
        ({"prompt": "a?", "answer": " "}, "answer is empty"),
        ({"prompt": " ", "answer": "1"}, "prompt is empty"),
        ({"prompt": 3, "answer": "1"}, "it must be text, or a list of messages"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}, "it must end with a question"),
        ({"text": "a?", "answer": "1"}, "column prompt is missing"),
        ({"prompt": "a?\n", "answer": "1", "tests": "x" * 300_000}, "characters of columns that rewards read"),
        ({"prompt": "What is it? wha", "answer": "t 1"}, "are one token"),
    ],
)
def test_a_row_that_cannot_be_asked_is_refused_with_its_place(stored, row, said):
    with pytest.raises(DataError, match=said):
        stored([row])


def test_rewards_must_give_the_reference_answer_more_than_an_empty_one(stored):
    rows = [{"prompt": f"{number}?\n", "answer": str(number)} for number in range(5)]
    with pytest.raises(RewardError, match=r"train/00000.parquet row 0 \(prompt '0.*reference answer '0' 0, and an empty one 0"):
        stored(rows, {"name": "grpo", "rewards": [{"name": "regular_expression", "pattern": "b"}]})


def test_a_reward_that_fails_stops_the_preparation_with_the_row(stored):
    code = LETTERS.replace("return sum", "if prompt.startswith('3'): return None\n    return 1 + sum").replace("1 + sum", "sum")
    with pytest.raises(RewardError, match=r"reward letters: returns NoneType None.*row 3 \(prompt '3"):
        stored([{"prompt": f"{number}?\n", "answer": "a"} for number in range(5)], {"name": "grpo", "rewards": [
            {"name": "letters", "code": code}]})  # fmt: skip


def test_a_prompt_that_leaves_no_room_is_dropped(stored):
    rows = [
        {"prompt": "word " * 300 + "\n", "answer": "1"},
        *({"prompt": f"{number}?\n", "answer": "1"} for number in range(30)),
    ]
    assert len(stored(rows, **{"data.contract": "warn"})) == 30
