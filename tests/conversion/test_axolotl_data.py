"""Data sets of axolotl whose type says more than names of columns."""

import pytest

from flytune.data.formats import Chat
from flytune.data.formats import convert as sample_of
from flytune.errors import RecipeError
from tests.support import converted as support

BASE = {"base_model": "Qwen/Qwen2.5-0.5B", "learning_rate": 1e-4, "adapter": "lora", "lora_target_linear": True}


def converted(tmp_path, **changes):
    return support.converted(tmp_path, "a.yml", BASE | changes)


@pytest.mark.parametrize(
    ("kind", "row", "question", "said"),
    [
        (
            "jeopardy",
            {"question": "q", "category": "c", "answer": "a"},
            "q\n\n### Input:\nc",
            'the words "what is" are not written',
        ),
        ("context_qa", {"article": "c", "question": "q", "answer": "a"}, "c\n===\nq", "the sentence before the context"),
        ("context_qa.load_v2", {"context": "c", "question": "q", "answer": "a"}, "c\nQuestion: q", 'the words "Context:"'),
        ("summarizetldr", {"article": "q", "summary": "a"}, "q", "the sentence that asks for a summary is not written"),
        ("alpaca_w_system.load_open_orca_chatml", {"system_prompt": "", "question": "q", "response": "a"}, "q", "chatml"),
    ],
)
def test_a_types_question_has_all_of_its_columns(kind, row, question, said, tmp_path):
    recipe, text = converted(tmp_path, datasets=[{"path": "a/b", "type": kind}])
    data = recipe.data
    sample = sample_of(row, data.format, data.columns, "here", separator=data.input_separator)
    asked, answered = ({"role": role, "content": said} for role, said in (("user", question), ("assistant", "a")))
    assert sample == Chat([asked, answered])
    assert said in text


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("reflection", "no format is like it"),
        ("pygmalion", "no format is like it"),
        ("context_qa.load_404", "no format is like it"),
        ("explainchoice.load", "no format is like it"),
        ("input_output", "write input_ids and labels"),
        ("zephyr.nectar", "several answers with ranks"),
    ],
)
def test_types_whose_samples_would_lack_something_are_refused(kind, said, tmp_path):
    changes = {"rl": "dpo"} if kind == "zephyr.nectar" else {}
    with pytest.raises(RecipeError, match=f"type: {kind}: .*{said}"):
        converted(tmp_path, datasets=[{"path": "a/b", "type": kind}], **changes)


@pytest.mark.parametrize("given", ["a/b", {"path": "a/b"}, [{"path": "a/b", "type": "pretrain"}]])
def test_rows_of_pretraining_are_text(given, tmp_path):
    recipe, _ = converted(tmp_path, pretraining_dataset=given, max_steps=10)
    assert (recipe.data.dataset_name, recipe.data.format, recipe.data.too_long) == ("a/b", "text", "split")


def test_held_out_samples_are_scored_each_epoch_as_axolotl_does(tmp_path):
    given = [{"path": "a/b", "type": "alpaca"}]
    assert converted(tmp_path, datasets=given, val_set_size=0.1)[0].evaluation.eval_steps == "epoch"
    assert converted(tmp_path, datasets=given)[0].evaluation.eval_steps is None


def test_a_number_of_held_out_samples_is_said_beside_the_share(tmp_path):
    recipe, text = converted(tmp_path, datasets=[{"path": "a/b", "type": "alpaca"}], val_set_size=500)
    assert recipe.data.heldout_fraction == 0.02
    assert "heldout_fraction: 0.02  # val_set_size: 500 samples; write their share of all samples" in text


ALPACA, CHATS = {"path": "a/b", "type": "alpaca"}, {"path": "c/d", "type": "chat_template"}


@pytest.mark.parametrize(
    ("datasets", "whole", "template", "said"),
    [
        ([ALPACA], None, "alpaca", "# type: alpaca"),
        ([ALPACA], "chatml", "alpaca", "# chat_template: chatml: type: alpaca has marks of its own there"),
        ([CHATS], "chatml", "chatml", "# chat_template: chatml"),
        ([ALPACA, CHATS], "chatml", "chatml", "# datasets: type: one chat template renders all data sets"),
        ([ALPACA, CHATS], None, "alpaca", "# datasets: type: one chat template renders all data sets"),
        ([CHATS], "tokenizer_default_fallback_chatml", None, "fallback_chatml: the tokenizer's own chat template"),
        ([CHATS, CHATS | {"path": "e/f"}], "tokenizer_default", None, ""),
    ],
)
def test_the_template_is_that_of_the_types(datasets, whole, template, said, tmp_path):
    recipe, text = converted(tmp_path, datasets=datasets, chat_template=whole)
    assert recipe.data.chat_template == template
    assert said in text
    assert said or "# datasets: type" not in text


@pytest.mark.parametrize("folder", ["json", "rows/"])
def test_files_of_a_data_set_are_sources(folder, tmp_path):
    """Also those of a folder that is not here."""
    given = [{"path": folder, "data_files": ["rows/a.jsonl", "rows/b.jsonl"], "type": "chat_template"}, ALPACA]
    recipe, _ = converted(tmp_path, datasets=given)
    found = [(source.name, source.format) for source in recipe.data.sources]
    assert found == [("rows/a.jsonl", "messages"), ("rows/b.jsonl", "messages"), ("a/b", "instruction")]
