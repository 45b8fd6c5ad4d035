"""Rows of prompts: their forms, the reference answer, the columns that rewards read, and the check of
both."""

import json
import shutil

import pytest

from flytune import data
from flytune.errors import DataError, RewardError
from flytune.recipe import DataRequest, Recipe
from tests.support.chats import checks_of
from tests.support.prompts import LETTERS
from tests.support.tiny import tiny_recipe, write_rows


@pytest.fixture
def stored(base, tmp_path):
    def prepare(rows, objective="grpo", **changes):
        file = write_rows(tmp_path / "rows.jsonl", rows)
        recipe = Recipe.model_validate(
            tiny_recipe(base, file, {"objective": objective, "data.heldout_fraction": 0.0} | changes)
        )
        shutil.rmtree(tmp_path / "dataset", ignore_errors=True)
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
        (
            {"prompt": [{"from": "human", "value": "1 + 1?"}], "completion": "It is 2", "answer": "2"},
            None,
            "It is 2",
        ),
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
    (row,) = stored(
        [{"prompt": "a?\n", "answer": "1", "tests": ["assert 1"], "schema": {"type": "object"}, "score": 3}]
    )
    fields = json.loads(row["fields"])
    assert (fields["tests"], fields["schema"], fields["score"]) == (["assert 1"], {"type": "object"}, 3)
    assert data.read_manifest(tmp_path / "dataset").left_out == {}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a?", "answer": " "}, "answer is empty"),
        ({"prompt": " ", "answer": "1"}, "prompt is empty"),
        ({"prompt": 3, "answer": "1"}, "it must be text, or a list of messages"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}, "it must end with a question"),
        ({"question ": "a?", "answer": "1"}, "column prompt is missing"),
        (
            {"problem": "a?", "answer": "1"},
            r"column prompt is missing, .*data.columns: {instruction: problem}",
        ),
        (
            {"prompt": "a?\n", "answer": "1", "tests": "x" * 300_000},
            "characters of columns that rewards read",
        ),
        ({"prompt": "What is it? wha", "answer": "t 1"}, "are one token"),
    ],
)
def test_a_row_that_cannot_be_asked_is_refused_with_its_place(stored, row, said):
    with pytest.raises(DataError, match=said):
        stored([row])


def test_rewards_must_give_the_reference_answer_more_than_an_empty_one(stored):
    rows = [{"prompt": f"{number}?\n", "answer": str(number)} for number in range(5)]
    with pytest.raises(
        RewardError,
        match=r"train/00000.parquet row 0 \(prompt '0.*reference answer '0' 0, and an empty one 0",
    ):
        stored(rows, {"name": "grpo", "rewards": [{"name": "regular_expression", "pattern": "b"}]})


def test_a_reward_that_fails_stops_the_preparation_with_the_row(stored):
    code = LETTERS.replace(
        "return sum", "if prompt.startswith('3'): return None\n    return 1 + sum"
    ).replace("1 + sum", "sum")
    with pytest.raises(RewardError, match=r"reward letters: returns NoneType None.*row 3 \(prompt '3"):
        stored(
            [{"prompt": f"{number}?\n", "answer": "a"} for number in range(5)],
            {"name": "grpo", "rewards": [{"name": "letters", "code": code}]},
        )


def test_a_prompt_that_leaves_no_room_is_dropped(stored):
    rows = [
        {"prompt": "word " * 300 + "\n", "answer": "1"},
        *({"prompt": f"{number}?\n", "answer": "1"} for number in range(30)),
    ]
    assert len(stored(rows, **{"data.contract": "warn"})) == 30


SEEN = """
def seen(completion, prompt, **columns):
    allowed = {"answer", "reference", "gold", "reward_model", "data_source"}
    assert columns.keys() <= allowed, sorted(columns)
    wanted = columns.get("gold") or columns.get("reference")
    if not isinstance(wanted, str):
        wanted = columns["reward_model"]["ground_truth"]
    return float(completion == wanted)
"""
"""A reward that raises for any column but these, and passes completions that the row asks for."""


@pytest.mark.parametrize(
    ("row", "columns", "reference"),
    [
        ({"prompt": "a?\n", "completion": "b"}, {}, "b"),
        ({"prompt": "a?\n", "reference": "b"}, {}, "b"),
        ({"prompt": "a?\n", "gold": "b"}, {"completion": "gold"}, "b"),
        ({"prompt": "a?\n", "answer": "b", "reference": {"id": 3}, "gold": "b"}, {}, "b"),
        ({"prompt": "a?\n", "data_source": "x", "reward_model": {"ground_truth": "b"}}, {}, "b"),
        (
            {"prompt": "a?\n", "reward_model": {"ground_truth": "b"}},
            {"completion": "reward_model.ground_truth"},
            "b",
        ),
    ],
)
def test_a_reward_gets_all_columns_and_the_answer_once(stored, row, columns, reference):
    rewards = {"name": "grpo", "rewards": [{"name": "seen", "code": SEEN}]}
    (made,) = stored([row], rewards, **{"data.columns": columns})
    question = data.rows.prompts.stored_prompt(made)
    assert question.reference == reference
    assert question.prompt == "a?\n"
    assert question.columns["reference"] == row.get("reference", reference)
    assert question.columns["answer"] == row.get("answer", reference)


def test_rows_without_a_reference_answer_are_asked_and_counted(stored, base, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"{number}?"}], "tests": "x = 1"} for number in range(9)]
    rows += [{"prompt": "3?", "answer": ["3", "three"]}, {"prompt": "4?", "answer": None}]
    rows = [row if isinstance(row["prompt"], list) else row | {"prompt": rows[0]["prompt"]} for row in rows]
    rows += [{"question": "5?", "answer": "5"}]
    made = stored(
        rows, {"name": "grpo", "rewards": [{"name": "letters", "code": LETTERS.replace(", answer", "")}]}
    )
    before = [texts(row, base) for row in made]
    assert [after for _, after in before if after] == ["5<|im_end|>\n"] or before[-1][1].startswith("5")
    assert all(prompt.endswith("<|im_start|>assistant\n") for prompt, _ in before)
    check = checks_of(tmp_path / "dataset")["reference answers"]
    assert (check.count, check.of, check.verdict) == (11, 12, "ok")


def test_prompts_of_bare_text_are_told_where_the_base_has_a_chat_template(stored, tmp_path):
    letters = {"name": "grpo", "rewards": [{"name": "letters", "code": LETTERS.replace(", answer", "")}]}
    stored([{"prompt": f"{number}?\n"} for number in range(3)], letters)
    check = checks_of(tmp_path / "dataset")["chat template"]
    assert (check.count, check.of, check.verdict) == (3, 3, "warning")
    stored(
        [{"prompt": f"{number}?\n"} for number in range(3)],
        letters,
        **{"data.columns": {"instruction": "prompt"}},
    )
    assert checks_of(tmp_path / "dataset")["chat template"].verdict == "ok"


def test_a_reward_says_which_column_it_wants(stored):
    with pytest.raises(
        RewardError, match=r"reward exact_answer: .*the row has no column answer.*row 0 \(prompt '0"
    ):
        stored(
            [{"prompt": f"{number}?\n", "solution": "1"} for number in range(3)],
            {"name": "grpo"} | {"rewards": ["exact_answer"]},
        )


def test_a_prompt_without_a_reference_answer_leaves_room_for_a_token(stored):
    letters = {"name": "grpo", "rewards": [{"name": "letters", "code": LETTERS.replace(", answer", "")}]}
    length = len(stored([{"prompt": "a b c d e f\n"}], letters)[0]["input_ids"])
    section = letters | {"max_completion_length": 1}
    with pytest.raises(DataError, match="none of 1 row is left"):
        stored([{"prompt": "a b c d e f\n"}], section, **{"data.max_length": length})


def test_prompts_that_leave_less_room_than_the_longest_answer_are_counted(stored, tmp_path):
    section = {"name": "grpo", "rewards": ["exact_answer"], "max_completion_length": 60}
    rows = [
        {"prompt": f"{number}? " + "word " * (12 if number < 3 else 1) + "\n", "answer": "1"}
        for number in range(8)
    ]
    made = stored(rows, section, **{"data.max_length": 100})
    assert sorted(data.rows.prompts.prompt_length(row) for row in made) == [8] * 5 + [52] * 3
    check = checks_of(tmp_path / "dataset")["room for answers"]
    assert (check.count, check.of, check.verdict) == (3, 8, "warning")
