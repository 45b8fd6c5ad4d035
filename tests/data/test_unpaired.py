"""Answers with labels, in all shapes that data sets have them in."""

import re
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from flytune import data
from flytune.data.columns import NamedRow
from flytune.data.formats import Chat, Plain
from flytune.data.rows.labelled import labelled_of, weight_advice
from flytune.errors import DataError, RecipeError
from flytune.recipe import Recipe
from flytune.report import xray
from tests.support.chats import checks_of
from tests.support.preferences import prepare_rows, rows_of, write_labelled, write_preferences
from tests.support.tiny import tiny_recipe

ASKED, YES = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This."}


def labelled(row, form="auto", **columns):
    return labelled_of(NamedRow(row, columns, "here", format=form))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASKED], "completion": [YES]},
        {"prompt": [ASKED], "completion": "This."},
        {"prompt": "Which?", "completion": [YES]},
        {"prompt": [ASKED], "completion": [ASKED, YES]},
        {"messages": [ASKED, YES]},
        {"conversations": [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "This."}]},
        {"messages": [ASKED], "completion": YES},
        {"instruction": "Which?", "input": "", "output": "This."},
        {"question": "Which?", "completion": "This."},
        {
            "prompt": [{"from": "human", "value": "Which?"}],
            "completion": [{"from": "gpt", "value": "This."}],
        },
    ],
)
def test_messages_in_all_forms_are_the_same_answer(row):
    found = labelled(row | {"label": False})
    assert (found.samples, found.labels) == ([Chat([ASKED, YES])], [False])
    assert found.prompt == labelled({"prompt": [ASKED], "completion": "That.", "label": True}).prompt


def test_text_and_other_names_of_columns():
    found = labelled({"q": "Q: ", "a": "yes", "good": True}, prompt="q", completion="a", label="good")
    assert (found.samples, found.labels, found.prompt) == ([Plain("Q: ", "yes")], [True], "Q: ")


@hypothesis.given(prompt=st.text(min_size=1), chosen=st.text(), rejected=st.text())
def test_a_preference_is_two_answers_as_trl_unpairs_it(prompt, chosen, rejected):
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if chosen == rejected:
        with pytest.raises(DataError, match="nothing to prefer"):
            labelled(row)
        return
    found = labelled(row)
    assert found.samples == [Plain(prompt, chosen), Plain(prompt, rejected)]
    assert found.labels == [True, False]
    assert labelled({"prompt": prompt, "completion": chosen, "label": True}).prompt == found.prompt
    assert labelled(row, "preference") == found


@pytest.mark.parametrize(
    ("value", "label"),
    [(True, True), (1, True), ("True", True), ("false", False), (0, False), (1.0, True), ("0.0", False)],
)
def test_a_label_may_be_a_number_or_text_and_have_another_name(value, label):
    for name in ("label", "kto_tag"):
        assert labelled({"instruction": "Which?", "output": "This.", name: value}).labels == [label]


NO_LABELS = st.one_of(
    st.none(),
    st.integers().filter(lambda one: one not in (0, 1)),
    st.floats(),
    st.text(),
    st.lists(st.booleans()),
)


@hypothesis.given(
    label=NO_LABELS.filter(
        lambda one: str(one).strip().lower() not in ("0", "1", "0.0", "1.0", "true", "false")
    )
)
def test_a_label_is_true_or_false_and_nothing_else(label):
    with pytest.raises(
        DataError, match="here: label is .*; it must be true for a desirable answer, or false"
    ):
        labelled({"prompt": "q", "completion": "a", "label": label})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": "q", "completion": "a"},
            "here: column label is missing; the columns are prompt, completion",
        ),
        ({"completion": "a", "label": True}, "here: column prompt is missing"),
        ({"prompt": 3, "completion": "a", "label": True}, "here: prompt: messages must be a list"),
        (
            {"prompt": [ASKED], "completion": [ASKED], "label": True},
            "after the prompt, completion has nothing",
        ),
        ({"prompt": [YES], "completion": [ASKED], "label": True}, "completion has a message of 'user'"),
        (
            {"messages": [ASKED], "label": True},
            "the turns end with a message of 'user'; they must end with the answer",
        ),
        ({"messages": [ASKED, YES, ASKED], "label": True}, "the turns end with a message of 'user'"),
        ({"messages": [ASKED, YES]}, "here: column label is missing"),
        ({"prompt": "q", "completion": "a", "label": True, "image": "x.png"}, "column image has content"),
    ],
)
def test_rows_that_are_no_labelled_answers_say_why(row, said):
    with pytest.raises(DataError, match=re.escape(said)):
        labelled(row)


def prepared(base, rows, folder, changes=None):
    return prepare_rows(base, rows, folder, {"objective": "kto"} | (changes or {}))


def stored(folder, recipe):
    """Return text and label of each stored row, and the split that it is in."""
    tokenizer = data.load_tokenizer(recipe.model, recipe.data)
    return {
        (tokenizer.decode(row["input_ids"]).removesuffix(tokenizer.eos_token), bool(row["label"])): split
        for split in ("train", "heldout")
        for row in data.load(folder, split)
    }


def test_answers_are_stored_with_their_labels_and_split_by_prompt(base, tmp_path):
    rows = rows_of(write_labelled(tmp_path / "rows.jsonl", 80))
    manifest, folder, recipe = prepared(base, rows, tmp_path / "a")
    assert (manifest.row_kind, manifest.format) == ("labelled_answers", "unpaired")
    found = stored(folder, recipe)
    assert set(found) == {(row["prompt"] + row["completion"], row["label"]) for row in rows}
    assert manifest.train.desirable + manifest.heldout.desirable == sum(row["label"] for row in rows)
    splits = {}
    for (text, _), split in found.items():
        splits.setdefault(text.split("numbers.\n")[0], set()).add(split)
    assert len(splits) == 40
    assert all(len(names) == 1 for names in splits.values()), "no prompt is in both parts"
    heldout = data.heldout_rows(folder, 100)
    assert sum(row["label"] for row in heldout) == manifest.heldout.desirable


def test_preferences_become_twice_as_many_answers(base, tmp_path):
    rows = rows_of(write_preferences(tmp_path / "pairs.jsonl", 60))
    manifest, folder, recipe = prepared(base, rows, tmp_path / "a")
    assert (manifest.rows, manifest.train.samples + manifest.heldout.samples) == (60, 120)
    assert manifest.train.desirable == manifest.train.samples / 2
    texts = {(row["prompt"] + row[name], name == "chosen") for row in rows for name in ("chosen", "rejected")}
    assert set(stored(folder, recipe)) == texts


def test_bad_cut_and_duplicate_answers_are_counted(base, tmp_path):
    rows = rows_of(write_labelled(tmp_path / "rows.jsonl", 60))
    long = {"prompt": "q " * 300, "completion": "a", "label": True}
    cut = {"prompt": "Question: ", "completion": "The sum is " * 100, "label": False}
    bad = {"prompt": "q", "completion": "a", "label": "yes"}
    manifest, folder, _ = prepared(
        base, [*rows, long, cut, bad], tmp_path / "a", {"data.max_bad_fraction": 0.1}
    )
    assert (manifest.truncated, manifest.dropped_untrained, manifest.bad) == (2, 1, 1)
    assert manifest.train.samples + manifest.heldout.samples == 61
    assert "it must be true for a desirable answer" in (folder / "bad_rows.jsonl").read_text(encoding="utf-8")
    manifest, _, _ = prepared(base, [*rows, rows[0], rows[7]], tmp_path / "b", {"data.deduplicate": True})
    assert (manifest.duplicates, manifest.train.samples + manifest.heldout.samples) == (2, 60)
    with pytest.raises(DataError, match=r"rows.jsonl:61: .* set data.too_long to truncate or drop"):
        prepared(base, [*rows, long], tmp_path / "c", {"data.too_long": "error"})


def test_the_contract_has_the_labels_and_stops_where_all_are_equal(base, tmp_path):
    rows = rows_of(write_labelled(tmp_path / "rows.jsonl", 80))
    manifest, folder, _ = prepared(base, rows, tmp_path / "a")
    checks = checks_of(folder)
    train = manifest.train
    said = (
        f"{train.desirable} of {train.samples} train answers are desirable; KTO's paper takes "
        "objective.desirable_weight"
    )
    assert checks["labels, train"].found.startswith(said)
    assert checks["labels, held-out"].verdict == "ok"
    with pytest.raises(
        DataError, match="train answers are desirable.*all labels are equal, so nothing is compared"
    ):
        prepared(base, [row | {"label": True} for row in rows], tmp_path / "b")


@hypothesis.given(desirable=st.integers(1, 10**6), undesirable=st.integers(1, 10**6))
def test_the_advised_weights_balance_the_labels(desirable, undesirable):
    low, high, under_low, under_high = map(
        float, re.findall(r"\d[\d.e+-]*", weight_advice(desirable, undesirable))
    )
    for weight, other in ((low, 1), (high, 1), (1, under_low), (1, under_high)):
        assert 0.98 < weight * desirable / (other * undesirable) < 1.36


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data.packing": True}, "data.packing: objective: kto pads its rows"),
        ({"data.too_long": "split"}, "data.too_long: split, but a piece of an answer"),
        (
            {"data.format": "messages"},
            "data.format: messages, but objective: kto compares labelled answers; write unpaired,",
        ),
        (
            {"training.global_batch_size": 1},
            "training.global_batch_size: 1, but objective: kto estimates the KL divergence",
        ),
        (
            {"objective": {"name": "kto", "loss_type": "sigmoid"}},
            "loss_type: must be 'kto' or 'apo_zero_unpaired'",
        ),
        ({"objective": {"name": "dpo", "loss_type": "kto"}}, "loss_type: must be 'sigmoid', 'sigmoid_norm'"),
        (
            {"objective": {"name": "kto", "loss_type": ["kto", "apo_zero_unpaired"]}},
            "loss_type: kto has one loss",
        ),
        (
            {"objective": {"name": "kto", "label_smoothing": 0.1}},
            "label_smoothing: only for name: dpo, and this is kto",
        ),
        (
            {"objective": {"name": "dpo", "desirable_weight": 2}},
            "desirable_weight: only for name: kto, and this is dpo",
        ),
        (
            {"objective": {"name": "kto", "desirable_weight": 0}},
            "desirable_weight: must be 1e-06 or greater; found 0",
        ),
        ({"objective": "sft", "data.format": "unpaired"}, "data.format: unpaired has undesirable answers"),
        (
            {"objective": "dpo", "data.format": "unpaired"},
            "data.format: unpaired, but objective: dpo compares two answers",
        ),
    ],
)
def test_contradictions_are_refused_with_the_recipe(changes, said):
    with pytest.raises(RecipeError, match=re.escape(said)):
        Recipe.model_validate(tiny_recipe(Path("base"), Path("rows.jsonl"), {"objective": "kto"} | changes))


def test_a_step_of_one_row_is_enough_without_the_divergence():
    changes = {
        "objective": {"name": "kto", "loss_type": "apo_zero_unpaired"},
        "training.global_batch_size": 1,
    }
    assert Recipe.model_validate(tiny_recipe(Path("base"), Path("rows.jsonl"), changes)).objective.beta == 0.1


def test_sft_does_not_train_undesirable_answers_by_mistake(base, tmp_path):
    rows = rows_of(write_labelled(tmp_path / "rows.jsonl", 8))
    with pytest.raises(
        DataError, match="the column label says which answers are undesirable, .*write objective: kto"
    ):
        prepared(base, rows, tmp_path / "a", {"objective": "sft"})
    manifest, _, _ = prepared(
        base, rows, tmp_path / "b", {"objective": "sft", "data.format": "prompt_completion"}
    )
    assert manifest.rows == 8


@pytest.mark.parametrize("paired", [False, True])
def test_the_xray_shows_single_answers_with_their_labels(paired, base, tmp_path):
    rows = (
        write_preferences(tmp_path / "rows.jsonl", 24)
        if paired
        else write_labelled(tmp_path / "rows.jsonl", 24)
    )
    _, folder, recipe = prepared(base, rows_of(rows), tmp_path / "a")
    text = xray.page(folder, recipe, tmp_path / "page.html").read_text()
    assert "Pair 1" not in text
    assert {"trained, desirable", "trained, undesirable"} == set(
        re.findall(r"trained, (?:un)?desirable", text)
    )
