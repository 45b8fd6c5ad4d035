"""`flytune infer` and `flytune chat` on this machine: answers are those of the model to each prompt, given
alone."""

import io
import json
import sys
from types import SimpleNamespace

import pytest

from flytune.adapters import merging
from flytune.cli import chat, main
from flytune.data.messages import Message
from flytune.errors import DataError
from flytune.inference import batch, conversation, prompts
from flytune.models import Generation
from flytune.recipe import Recipe
from tests.support.stages import write_dataset
from tests.support.store import stored

LIMIT = Generation(max_new_tokens=6)
QUESTION = "Add 1 and 2."
CHAT: list[Message] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def store(base, tmp_path_factory):
    folder, dataset = (
        tmp_path_factory.mktemp("store"),
        write_dataset(tmp_path_factory.mktemp("dataset"), base),
    )
    stored(folder, base, dataset, "short", steps=5)
    stored(folder, base, dataset, "long", steps=30)
    merging.merge(folder / "short", folder / "merged")
    return folder


def answer_to(model, row):
    (answered,) = model.answers([{"row": row, "where": "here"}], LIMIT)
    return answered.text


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("folder", ["short", "merged"])
def test_questions_of_all_forms_get_the_answer_to_their_chat(folder, store, tmp_path, capsys):
    rows = [{"messages": CHAT}, {"question": QUESTION}, {"prompt": CHAT}, {"instruction": QUESTION}]
    rows.append({"conversations": [{"from": "human", "value": QUESTION}]})
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["infer", str(store / folder), "--prompts", str(file), "--max-new-tokens", "6"]) == 0
    answered = lines_of(capsys.readouterr().out)
    expected = answer_to(batch.InferenceModel(store / folder, {}), {"messages": CHAT})
    assert [line["answer"] for line in answered] == [expected] * 5
    assert answered[1]["question"] == QUESTION


def test_other_adapters_answer_their_rows_into_a_new_file(store, tmp_path, capsys):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    file.write_text(
        '{"prompt": "The sum", "adapter": "other"}\n'
        '{"prompt": "The sum", "adapter": "base"}\n'
        '{"prompt": ""}\n'
    )
    command = [
        "infer",
        str(store / "short"),
        "--prompts",
        str(file),
        "--max-new-tokens",
        "6",
        "--out",
        str(out),
    ]
    command += ["--adapter", f"other={store / 'long'}"]
    assert main(command) == 1
    assert "prompts.jsonl:3: prompt is empty" in capsys.readouterr().err
    assert not out.exists()
    assert main([*command, "--max-bad-fraction", "0.5"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}\n"
    assert "1 row not answered" in said.err
    models = batch.InferenceModel(store / "short", {"other": store / "long"})
    expected = [answer_to(models, {"prompt": "The sum", "adapter": name}) for name in ("other", "base")]
    assert [line["answer"] for line in lines_of(out.read_text())] == expected


def test_columns_have_the_names_and_the_system_prompt_of_the_training(base):
    recipe = Recipe.model_validate(
        {
            "name": "r",
            "model": {"name_or_path": str(base)},
            "data": {
                "path": "rows.jsonl",
                "columns": {"instruction": "ask", "input": "about"},
                "input_separator": " / ",
                "system_prompt": "Be brief.",
            },
            "method": {"name": "full"},
            "sharding": "none",
            "training": {"learning_rate": 1e-4, "global_batch_size": 1},
        }
    )
    columns = prompts.Columns.of(recipe)
    asked = columns.question({"ask": "Add", "about": "1 2"}, "here")
    assert asked == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add / 1 2"}]
    with pytest.raises(DataError, match="here: neither prompt nor messages nor question; there are text"):
        prompts.Columns().question({"text": "Add"}, "here")


def test_columns_have_our_names_where_a_row_lacks_those_of_the_training():
    columns = prompts.Columns(
        names={"messages": "turns", "system": "before", "role": "who", "tools": "calls"}
    )
    system: Message = {"role": "system", "content": "Be brief."}
    for row in (
        {"messages": CHAT, "system": "Be brief."},
        {"turns": [{"who": "user", "content": QUESTION}], "before": "Be brief."},
    ):
        assert columns.question(row, "here") == [system, *CHAT]
    tool = {"type": "function", "function": {"name": "add"}}
    assert columns.tools({"calls": [tool]}, "here") == columns.tools({"tools": [tool]}, "here") == [tool]


def test_a_conversation_remembers_until_it_begins_again(store):
    model = batch.InferenceModel(store / "short", {})
    talk, shown = conversation.Conversation(model, LIMIT, "Be brief."), []
    system: Message = {"role": "system", "content": "Be brief."}
    first = talk.answer(QUESTION, shown.append)
    assert "".join(shown) == first == answer_to(model, {"messages": [system, *CHAT]})
    history: list[Message] = [*CHAT, {"role": "assistant", "content": first}]
    second = talk.answer("And 3?", shown.append)
    assert second == answer_to(model, {"messages": [system, *history, {"role": "user", "content": "And 3?"}]})
    talk.clear()
    assert talk.answer(QUESTION, shown.append) == first


def test_chat_answers_the_lines_of_a_pipe(store, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n\n/new\n{QUESTION}\n"))
    assert main(["chat", str(store / "short"), "--max-new-tokens", "6"]) == 0
    expected = answer_to(batch.InferenceModel(store / "short", {}), {"messages": CHAT})
    assert capsys.readouterr().out == f"{expected}\n{expected}\n"


def test_what_a_model_writes_is_no_command_for_the_terminal(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def answered(file, artifact, others, generation, out, consent):
        out.mkdir()
        (out / "answers.jsonl").write_text("A\x1b[2J\x9b0m\n")
        return SimpleNamespace(rows=1, answer_tokens=1, stopped=1, bad=0)

    monkeypatch.setattr("sys.stdout", Terminal())
    chat._show("A\x1b[2J\x9b0m\n")
    monkeypatch.setattr(batch, "answer_file", answered)
    assert main(["infer", str(tmp_path), "--prompts", str(tmp_path / "prompts.jsonl")]) == 0
    assert sys.stdout.getvalue() == 2 * "A\\x1b[2J\\x9b0m\n"
