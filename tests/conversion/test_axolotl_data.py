"""Data sets of axolotl whose type says more than names of columns."""

import pytest

from flytune.data.columns import NamedRow
from flytune.data.formats import Chat, Plain
from flytune.data.formats import convert as sample_of
from flytune.data.rows.pairs import pair_of
from flytune.errors import RecipeError
from tests.support import converted as support

BASE = {
    "base_model": "Qwen/Qwen2.5-0.5B",
    "learning_rate": 1e-4,
    "adapter": "lora",
    "lora_target_linear": True,
}


def converted(tmp_path, **changes):
    return support.converted(tmp_path, "a.yml", BASE | changes)


ALPACA, CHATS = {"path": "a/b", "type": "alpaca"}, {"path": "c/d", "type": "chat_template"}
TEXT = {"path": "g/h", "type": "completion"}
QUESTION = {"instruction": "q", "input": "i", "output": "a"}


@pytest.mark.parametrize(
    ("kind", "row", "question", "template"),
    [
        ("alpaca", QUESTION, "q\n\n### Input:\ni", "alpaca"),
        ("alpaca:chatml", QUESTION, "q\n\ni", "chatml"),
        (
            "alpaca_w_system.load_open_orca_chatml",
            {"system_prompt": "", "question": "q", "response": "a"},
            "q",
            "chatml",
        ),
    ],
)
def test_a_types_question_has_all_of_its_columns(kind, row, question, template, tmp_path):
    data = converted(tmp_path, datasets=[{"path": "a/b", "type": kind}])[0].data
    sample = sample_of(NamedRow(row, data.columns, "here", data.input_separator), data.format)
    asked, answered = (
        {"role": role, "content": said} for role, said in (("user", question), ("assistant", "a"))
    )
    assert (sample, data.chat_template) == (Chat([asked, answered]), template)


WORDS = {"field_instruction": "q", "field_output": "a", "format": "[INST] {instruction} [/INST]"}


@pytest.mark.parametrize(
    ("kind", "rl"),
    [
        (WORDS, None),
        (WORDS | {"format": "{instruction}", "system_prompt": "Be brief."}, None),
        (WORDS | {"format": "{instruction}", "no_input_format": "Q: {instruction}"}, None),
        (WORDS | {"format": None}, None),
        ({"prompt_format": "[INST] {prompt} [/INST]"}, "dpo"),
        ({"chosen_format": "{chosen}</s>"}, "dpo"),
        ({"completion_format": "{completion}</s>"}, "kto"),
        ("alpaca:chat", None),
        ("alpaca_chat.load_qa", None),
        ("alpaca_w_system.load_open_orca", None),
        ("jeopardy", None),
        ("context_qa.load_v2", None),
        ("summarizetldr", None),
    ],
)
def test_words_around_questions_are_kept_in_a_jinja_file_or_refused(kind, rl, tmp_path):
    """No shipped template has them, and the tokenizer's own has others."""
    given = {"path": "a/b", "type": kind}
    with pytest.raises(
        RecipeError, match=r"words of its own .* name it in the data set \(chat_template_jinja: FILE\)"
    ):
        converted(tmp_path, rl=rl, datasets=[given])
    assert (
        converted(tmp_path, rl=rl, datasets=[given | {"chat_template_jinja": "own.jinja"}])[
            0
        ].data.chat_template
        == "own.jinja"
    )


def test_a_type_of_texts_without_words_is_text(tmp_path):
    recipe, _ = converted(tmp_path, datasets=[{"path": "a/b", "type": WORDS | {"format": "{instruction}"}}])
    row = {"q": "Question: ", "a": "Answer."}
    assert sample_of(NamedRow(row, recipe.data.columns, "here"), recipe.data.format) == Plain(
        "Question: ", "Answer."
    )
    own = {"field_prompt": "q", "field_chosen": "a", "field_rejected": "b", "prompt_format": "{q}"}
    recipe, _ = converted(tmp_path, rl="dpo", datasets=[{"path": "a/b", "type": own}])
    pair = pair_of(NamedRow(row | {"b": "Wrong."}, recipe.data.columns, "here"))
    assert (pair.chosen, pair.rejected) == (Plain("Question: ", "Answer."), Plain("Question: ", "Wrong."))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"roles_to_train": ["user", "assistant"]}, "answers of the assistant are trained, and no others"),
        ({"train_on_eos": "all"}, "the end marker of each answer is trained"),
        ({"message_field_training": "learn"}, "a turn's key train or weight"),
        ({"drop_system_message": True}, "system messages of the rows are kept"),
        ({"shards": 4}, "write max_samples"),
        ({"data_files": ["a.jsonl"], "split": "train[:10%]"}, "split: train.* a file is read completely"),
    ],
)
def test_keys_of_a_data_set_that_change_what_is_trained_are_refused(changes, said, tmp_path):
    with pytest.raises(RecipeError, match=said):
        converted(tmp_path, datasets=[CHATS | changes])
    harmless = {"roles_to_train": ["assistant"], "train_on_eos": "turn", "message_field_training": "train"}
    assert converted(tmp_path, datasets=[CHATS | harmless])[0].data.format == "messages"
    older = converted(tmp_path, datasets=[CHATS | {"train_on_split": "dev"}])[0]
    assert older.data.dataset_split == "dev"


def test_files_of_a_data_set_on_the_hub_are_its_sources(tmp_path):
    recipe, _ = converted(tmp_path, datasets=[CHATS | {"data_files": ["x/a.jsonl"], "revision": "v1"}])
    assert (recipe.data.path, recipe.data.dataset_name) == ("hf://datasets/c/d@v1/x/a.jsonl", None)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("reflection", "no format is like it"),
        ("pygmalion", "no format is like it"),
        ("alpaca.own", "no format is like it"),
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


@pytest.mark.parametrize(
    ("datasets", "whole", "template", "said"),
    [
        ([ALPACA], None, "alpaca", "# type: alpaca"),
        ([ALPACA], "chatml", "alpaca", "# chat_template: chatml: type: alpaca has marks of its own there"),
        ([CHATS], "chatml", "chatml", "# chat_template: chatml"),
        ([ALPACA, TEXT], None, "alpaca", "# type: alpaca"),
        (
            [CHATS, TEXT, CHATS | {"path": "e/f", "chat_template": "chatml"}],
            "chatml",
            "chatml",
            "# chat_template: chatml",
        ),
        (
            [CHATS],
            "tokenizer_default_fallback_chatml",
            None,
            "fallback_chatml: the tokenizer's own chat template",
        ),
        ([CHATS, CHATS | {"path": "e/f"}], "tokenizer_default", None, ""),
    ],
)
def test_the_template_is_that_of_the_types(datasets, whole, template, said, tmp_path):
    recipe, text = converted(tmp_path, datasets=datasets, chat_template=whole)
    assert recipe.data.chat_template == template
    assert said in text
    assert said or "# datasets: type" not in text


@pytest.mark.parametrize(
    "datasets",
    [
        [ALPACA, CHATS],
        [ALPACA, TEXT, CHATS | {"type": "sharegpt"}],
        [CHATS, CHATS | {"path": "e/f", "chat_template": "llama3"}],
        [ALPACA, ALPACA | {"chat_template_jinja": "own.jinja"}],
    ],
)
def test_data_sets_of_several_templates_are_refused(datasets, tmp_path):
    with pytest.raises(
        RecipeError, match="each has marks of its own, and one chat template renders all chats of a recipe"
    ):
        converted(tmp_path, datasets=datasets)


@pytest.mark.parametrize("folder", ["json", "rows/"])
def test_files_of_a_data_set_are_sources(folder, tmp_path):
    """Also those of a folder that is not here."""
    given = [{"path": folder, "data_files": ["rows/a.jsonl", "rows/b.jsonl"], "type": "chat_template"}, TEXT]
    recipe, _ = converted(tmp_path, datasets=given)
    found = [(source.name, source.format) for source in recipe.data.sources]
    assert found == [("rows/a.jsonl", "messages"), ("rows/b.jsonl", "messages"), ("g/h", "text")]


def test_a_folder_of_a_data_set_is_read_alone(tmp_path):
    (tmp_path / "rows").mkdir()
    for path, read in (("a/b", "hf://datasets/a/b/de"), ("./rows", "./rows/de")):
        given = [CHATS | {"path": path, "data_dir": "de"}]
        assert converted(tmp_path, datasets=given)[0].data.path == read


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"datasets": [CHATS | {"message_property_mappings": {"role": "from", "train": "is_trained"}}]},
            "message_property_mappings: train: is_trained: .* write train into the rows",
        ),
        ({"datasets": [CHATS], "tokenizer_config": "c/d"}, "tokenizer_config: c/d: the tokenizer is that of"),
        (
            {"datasets": [CHATS], "base_model_config": "c/d"},
            "base_model_config: c/d: the config.json is that",
        ),
        (
            {"datasets": [CHATS], "cosine_min_lr_ratio": 0.1, "cosine_constant_lr_ratio": 0.5},
            "cosine_constant_lr_ratio: 0.5: a cosine decays until the last step here",
        ),
    ],
)
def test_what_would_train_something_else_is_refused(changes, words, tmp_path):
    with pytest.raises(RecipeError, match=words):
        converted(tmp_path, **changes)


def test_held_out_rows_have_a_form_of_their_own(tmp_path):
    asked, answered = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    test = {"path": "t.jsonl", "type": "alpaca"}
    found = converted(tmp_path, datasets=[CHATS | {"path": "c.jsonl"}], test_datasets=[test])[0].data
    assert [(source.path, source.format) for source in found.sources] == [("c.jsonl", "messages")]
    assert sample_of(NamedRow(QUESTION | {"input": ""}, found.columns, "here"), found.format) == Chat(
        [asked, answered]
    )
    same = converted(tmp_path, datasets=[CHATS], test_datasets=[CHATS | {"path": "t.jsonl"}])[0].data
    assert (same.dataset_name, same.format, same.heldout_path) == ("c/d", "messages", "t.jsonl")
    other = {"path": "c/d", "name": "other", "type": "chat_template", "split": "test"}
    assert converted(tmp_path, datasets=[CHATS], test_datasets=[other])[0].data.eval_split is None


@pytest.mark.parametrize("length", [{"num_epochs": 0.25}, {"num_epochs": None, "max_steps": 100}])
def test_a_part_of_an_epoch_is_not_a_number_of_steps(length, tmp_path):
    recipe, _ = converted(tmp_path, datasets=[CHATS], saves_per_epoch=2, **length)
    assert recipe.checkpoints.save_steps == "epoch"


def test_another_score_than_the_loss_is_not_the_best(tmp_path):
    given = {"metric_for_best_model": "eval_accuracy", "load_best_model_at_end": True, "val_set_size": 0.1}
    recipe, text = converted(tmp_path, datasets=[CHATS], early_stopping_patience=2, **given)
    assert (recipe.checkpoints.export, recipe.evaluation.early_stopping_patience) == ("last", None)
    assert "# metric_for_best_model: eval_accuracy: only eval_loss is compared" in text
