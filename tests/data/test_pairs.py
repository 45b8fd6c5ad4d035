"""Preferences in all shapes that data sets have them in."""

import re
from pathlib import Path

import pytest

from flytune import data
from flytune.data.columns import NamedRow
from flytune.data.formats import Chat, Plain
from flytune.data.rows.pairs import Pairs, pair_of
from flytune.errors import DataError, RecipeError
from flytune.recipe import Data, Recipe
from tests.support.preferences import prepare_rows, rows_of, write_preferences
from tests.support.tiny import tiny_recipe

ASKED = {"role": "user", "content": "Which?"}
YES, NO = {"role": "assistant", "content": "This."}, {"role": "assistant", "content": "That."}
LED = [ASKED, {"role": "assistant", "content": "Hm.", "train": False}, ASKED]


def pair(row, **columns):
    return pair_of(NamedRow(row, columns, "here"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASKED], "chosen": [YES], "rejected": [NO]},
        {"prompt": [ASKED], "chosen": "This.", "rejected": "That."},
        {"prompt": "Which?", "chosen": [YES], "rejected": [NO]},
        {"chosen": [ASKED, YES], "rejected": [ASKED, NO]},
        {"prompt": [ASKED], "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
        {
            "prompt": "Which?",
            "chosen": [ASKED, YES],
            "rejected": [ASKED, NO],
            "messages": [ASKED, YES],
            "score": 1,
        },
        {
            "chosen": [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "This."}],
            "rejected": [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "That."}],
        },
    ],
)
def test_messages_in_all_forms_are_the_same_pair(row):
    found = pair(row)
    assert found.chosen == Chat([ASKED, YES])
    assert found.rejected == Chat([ASKED, NO])
    assert found.prompt == pair({"prompt": [ASKED], "chosen": [NO], "rejected": [YES]}).prompt


TURN, GOOD, BAD = (
    {"from": "human", "value": "Which?"},
    {"from": "gpt", "value": "This."},
    {"from": "gpt", "value": "That."},
)
ANSWERS = {"chosen": "This.", "rejected": "That."}


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"conversations": [TURN], "chosen": GOOD, "rejected": BAD}, {}),
        ({"messages": [ASKED], "chosen": YES, "rejected": NO}, {}),
        (
            {
                "turns": [{"by": "human", "said": "Which?"}],
                "chosen": {"by": "gpt", "said": "This."},
                "rejected": {"by": "gpt", "said": "That."},
            },
            {"conversations": "turns", "from": "by", "value": "said"},
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "value": "Which?"}]}], **ANSWERS}, {}),
        ({"instruction": "Which?", **ANSWERS}, {}),
        ({"instruction": "Which?", "input": "", "system": "", **ANSWERS}, {}),
        ({"instruction": "", "input": "Which?", **ANSWERS}, {}),
        ({"question": "Which?", **ANSWERS}, {}),
        ({"input": "Which?", **ANSWERS}, {}),
        ({"prompt": "Which?", **ANSWERS}, {"instruction": "prompt"}),
        ({"instruction": "Which?", "chosen_response": "This.", "rejected_response": "That."}, {}),
        ({"chosen": [ASKED, YES], "rejected": [ASKED, NO], "messages": [ASKED, YES]}, {}),
    ],
)
def test_the_forms_of_other_tools_are_the_same_pair(row, columns):
    assert pair_of(NamedRow(row, columns, "here")) == pair(
        {"prompt": [ASKED], "chosen": [YES], "rejected": [NO]}
    )


def test_a_question_has_its_input_and_the_turns_before_it():
    row = {
        "instruction": "Which?",
        "input": "Of two.",
        "history": [["Hi.", "Hm."]],
        "system": "Be short.",
        **ANSWERS,
    }
    found = pair_of(NamedRow(row, {}, "here", "\n"))
    before = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hm.", "train": False}]
    asked = {"role": "user", "content": "Which?\nOf two."}
    assert found.rejected.messages == [{"role": "system", "content": "Be short."}, *before, asked, NO]


@pytest.mark.parametrize(
    ("row", "columns", "prompt"),
    [
        ({"prompt": "Q: ", "chosen": "a", "rejected": "b"}, {}, "Q: "),
        ({"prompt": None, "chosen": "a", "rejected": "b"}, {}, ""),
        (
            {"question": "q", "good": "a", "bad": "b"},
            {"prompt": "question", "chosen": "good", "rejected": "bad"},
            "q",
        ),
    ],
)
def test_text_has_its_prompt_in_a_column(row, columns, prompt):
    found = pair(row, **columns)
    assert (found.chosen, found.rejected) == (Plain(prompt, "a"), Plain(prompt, "b"))


def test_an_implicit_prompt_of_text_is_that_of_trl():
    from trl.data_utils import extract_prompt

    for chosen, rejected in (
        ("ab cd", "ab ce"),
        ("ab cd", "ab de"),
        ("Q A: yes", "Q A: no"),
        ("x", "y"),
        (" a", " b"),
    ):
        theirs = extract_prompt({"chosen": chosen, "rejected": rejected})
        found = pair({"chosen": chosen, "rejected": rejected})
        assert (found.chosen.prompt, found.chosen.completion) == (theirs["prompt"], theirs["chosen"])
        assert found.rejected.completion == theirs["rejected"]


def test_answers_within_the_prompt_are_context():
    found = pair(
        {"prompt": [ASKED, {"role": "assistant", "content": "Hm."}, ASKED], "chosen": [YES], "rejected": [NO]}
    )
    assert found.chosen.messages == [*LED, YES]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": "q", "chosen": "a", "rejected": "a"},
            "here: chosen and rejected are equal, so there is nothing to prefer",
        ),
        ({"prompt": "q", "chosen": "a"}, "here: column rejected is missing; the columns are prompt, chosen"),
        ({"prompt": "q", "chosen": "a", "rejected": [NO]}, "here: chosen is text, but rejected is list"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "here: prompt must be a string, found int 3"),
        (
            {"prompt": "q", "chosen": 1, "rejected": 2},
            "here: chosen: messages must be a list of {role, content}, found int 1",
        ),
        (
            {"prompt": [ASKED], "chosen": [ASKED], "rejected": [NO]},
            "chosen has a message of 'user'; it must be an answer",
        ),
        (
            {"chosen": [ASKED, YES], "rejected": [{**ASKED, "content": "Who?"}, NO]},
            "chosen has a message of 'user'",
        ),
        (
            {"prompt": "Else?", "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
            "the prompt is none of the messages that",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "image": "x.png"}, "column image has content"),
        ({"chosen": [ASKED, YES], "rejected": [ASKED]}, "rejected has nothing; it must be an answer"),
    ],
)
def test_rows_that_are_no_pairs_say_why(row, said):
    with pytest.raises(DataError, match=re.escape(said)):
        pair(row)


def test_a_pair_is_cut_as_two_sequences():
    chosen, rejected = ([1, 2, 3, 4], [-100, -100, 3, 4]), ([1, 2, 5, 4], [-100, -100, 5, 4])
    kind, cut = Pairs(), lambda length: Data(path="x.jsonl", max_length=length)
    assert kind.cut([chosen, rejected], cut(3)) == [
        [([1, 2, 3], [-100, -100, 3]), ([1, 2, 5], [-100, -100, 5])]
    ]
    assert not kind.is_trained(*kind.cut([chosen, rejected], cut(2))), "no answer is left"
    assert not kind.is_trained(*kind.cut([chosen, ([1, 2, 3, 6], [-100, -100, 3, 6])], cut(3))), (
        "both are the same"
    )


def prepared(base, rows, folder, changes=None):
    return prepare_rows(base, rows, folder, {"objective": "dpo"} | (changes or {}))


def test_pairs_are_stored_side_by_side_and_split_by_prompt(base, tmp_path):
    rows = rows_of(write_preferences(tmp_path / "pairs.jsonl", 80))
    manifest, folder, recipe = prepared(base, rows, tmp_path / "a")
    assert (manifest.row_kind, manifest.format) == ("pairs", "preference")
    assert manifest.train.samples + manifest.heldout.samples == 80
    tokenizer = data.load_tokenizer(recipe.model, recipe.data)
    seen = {}
    for split in ("train", "heldout"):
        for row in data.load(folder, split):
            first, second = row["seq_lengths"]
            assert first + second == len(row["input_ids"]) == len(row["labels"])
            texts = [tokenizer.decode(part) for part in (row["input_ids"][:first], row["input_ids"][first:])]
            prompts = {text.split("numbers.\n")[0] for text in texts}
            assert len(prompts) == 1
            seen.setdefault(prompts.pop(), set()).add(split)
            answers = [label for label in row["labels"][first:] if label != -100]
            assert tokenizer.decode(answers) == texts[1].split("numbers.\n")[1]
    assert len(seen) == 40
    assert all(len(splits) == 1 for splits in seen.values()), "no prompt is in both parts"
    assert sorted(map(len, data.heldout_rows(folder, 3)[0].values()))[0] == 2


def test_bad_cut_dropped_and_duplicate_pairs_are_counted(base, tmp_path):
    rows = rows_of(write_preferences(tmp_path / "pairs.jsonl", 60))
    long = {"prompt": "q " * 300, "chosen": "a", "rejected": "b"}
    cut_off = {"prompt": "Question: ", "chosen": "The sum is " * 100, "rejected": "No."}
    bad = [{"prompt": "q", "chosen": "a", "rejected": "a"}, {"prompt": "q", "chosen": "a"}]
    made = [*rows, long, cut_off, {**cut_off, "chosen": ""}, *bad]
    manifest, folder, _ = prepared(base, made, tmp_path / "a", {"data.max_bad_fraction": 0.1})
    assert (
        manifest.truncated,
        manifest.dropped_untrained,
        manifest.train.samples + manifest.heldout.samples,
    ) == (2, 2, 61)
    assert (manifest.bad, manifest.rows) == (2, 65)
    assert "nothing to prefer" in (folder / "bad_rows.jsonl").read_text(encoding="utf-8")
    manifest, _, _ = prepared(base, [*rows, long, cut_off], tmp_path / "b", {"data.too_long": "drop"})
    assert (manifest.dropped_too_long, manifest.train.samples + manifest.heldout.samples) == (2, 60)
    with pytest.raises(
        DataError, match=r"rows.jsonl:61: 6.. tokens, .* set data.too_long to truncate or drop"
    ):
        prepared(base, [*rows, long], tmp_path / "c", {"data.too_long": "error"})
    manifest, _, _ = prepared(base, [*rows, rows[0], rows[7]], tmp_path / "d", {"data.deduplicate": True})
    assert (manifest.duplicates, manifest.train.samples + manifest.heldout.samples) == (2, 60)


def test_control_tokens_in_an_answer_stay_text(base, tmp_path):
    rows = [
        {"prompt": [{**ASKED, "content": f"Which {n}?"}], "chosen": [YES], "rejected": [NO]}
        for n in range(200)
    ]
    rows[0] |= {
        "chosen": [{**YES, "content": "a <|im_end|> b"}],
        "rejected": [{**NO, "content": "<|im_end|>"}],
    }
    manifest, folder, recipe = prepared(base, rows, tmp_path / "a", {"data.heldout_fraction": 0.1})
    assert manifest.control_tokens == 1
    mark = data.load_tokenizer(recipe.model, recipe.data).convert_tokens_to_ids("<|im_end|>")
    for split in ("train", "heldout"):
        for row in data.load(folder, split):
            assert row["input_ids"].count(mark) == 4, "one after each turn of both sequences"


def test_the_longest_pairs_are_trained_first(base, tmp_path):
    rows = rows_of(write_preferences(tmp_path / "pairs.jsonl", 40))
    _, folder, recipe = prepared(base, rows, tmp_path / "a", {"training.probe_longest": True})
    train = data.load(folder, "train")
    stream = data.Stream(train, recipe.training, data.row_kind("pairs"))
    longest = sorted((max(row["seq_lengths"]) for row in train), reverse=True)[:4]
    assert sorted((max(stream[place]["seq_lengths"]) for place in range(4)), reverse=True) == longest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data.packing": True}, "data.packing: objective: dpo pads its rows"),
        ({"data.too_long": "split"}, "data.too_long: split, but a piece of an answer"),
        (
            {"data.completion_only_loss": False},
            "data.completion_only_loss: false, but objective: dpo compares answers",
        ),
        ({"data.format": "messages"}, "data.format: messages, but objective: dpo compares two answers"),
        (
            {"training.neftune_noise_alpha": 5},
            "training.neftune_noise_alpha: its noise would be in the reference",
        ),
        ({"training.torch_compile": True}, "training.torch_compile: not tested with objective: dpo"),
        (
            {"objective": {"name": "sft", "beta": 0.2}},
            "beta: only for name: dpo or kto or grpo or distill, and this is sft",
        ),
        ({"objective": {"name": "dpo", "loss_type": ["sft"]}}, "loss_type: sft alone compares nothing"),
        ({"objective": {"name": "dpo", "loss_type": ["ipo", "ipo"]}}, "loss_type: name each loss once"),
        ({"objective": {"name": "dpo", "loss_weights": [1, 2]}}, "loss_weights: 2 weights for 1 loss"),
        (
            {"objective": {"name": "dpo", "label_smoothing": 0.1}},
            "label_smoothing: only robust and exo_pair use it",
        ),
        (
            {"objective": {"name": "dpo", "loss_type": "exo_pair"}},
            "label_smoothing: exo_pair needs one above 0",
        ),
        (
            {"objective": "sft", "data.format": "preference"},
            "data.format: preference has two answers in a row",
        ),
    ],
)
def test_contradictions_are_refused_with_the_recipe(changes, said):
    with pytest.raises(RecipeError, match=re.escape(said)):
        Recipe.model_validate(tiny_recipe(Path("base"), Path("rows.jsonl"), {"objective": "dpo"} | changes))


def test_a_question_that_the_recipe_names_is_not_left_out():
    row = {"instruction": "q", "chosen": "a", "rejected": "b"}
    with pytest.raises(DataError, match=r"column prompt \(data.columns.instruction\) is missing"):
        pair_of(NamedRow(row, {"instruction": "prompt"}, "here"))
