"""ShareGPT, tool calls, system prompts, tokens: what each becomes, and what is said about rows that do not
fit."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from flytune.data.columns import NamedRow
from flytune.data.formats import Chat, Tokens, choose, convert
from flytune.data.labels import IGNORED, encode, validated
from flytune.data.readers import read
from flytune.data.render import ChatTemplate, render
from flytune.errors import DataError
from flytune.recipe import Data
from tests.support.chats import CHATML, prepared, stored
from tests.support.paths import ROOT

USER, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": None}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] }}"
    "{% if message['content'] %}{{ '\n' + message['content'] }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\n<call>' + call.function.name + ' ' + call.function.arguments | tojson + '</call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
)
"""As Qwen's: the name of a role, then content or calls, each after a new line."""


def trained(chat: Chat, tokenizer: Any) -> tuple[str, str]:
    """The text of a chat and what of it is trained."""
    ids, labels = next(encode([render(chat, ChatTemplate(tokenizer), True, "x:1")], tokenizer))
    return tokenizer.decode(ids), tokenizer.decode([label for label in labels if label != IGNORED])


def checking(condition: str, reason: str) -> str:
    """The beginning of a template that refuses some messages."""
    return (
        f"{{% for m in messages %}}{{% if {condition} %}}{{{{ raise_exception('{reason}') }}}}{{% endif "
        f"%}}{{% endfor %}}"
    )


def turns(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": speaker, "value": text} for speaker, text in said]


@pytest.mark.parametrize(
    ("row", "columns", "sample"),
    [
        ({"conversations": turns(("human", "q"), ("gpt", "a"))}, {}, Chat([USER, SAID])),
        ({"conversations": turns(("user", "q"), ("chatgpt", "a"))}, {}, Chat([USER, SAID])),
        (
            {"talk": turns(("human", "q"), ("gpt", "a")), "messages": 1},
            {"conversations": "talk"},
            Chat([USER, SAID]),
        ),
        ({"conversations": [USER, SAID]}, {}, Chat([USER, SAID])),
        (
            {"conversations": turns(("system", "s"), ("human", "q"), ("gpt", "a"))},
            {},
            Chat([{"role": "system", "content": "s"}, USER, SAID]),
        ),
        (
            {"conversations": turns(("human", "q"), ("gpt", "a")), "system": "s"},
            {},
            Chat([{"role": "system", "content": "s"}, USER, SAID]),
        ),
        (
            {
                "conversations": turns(
                    ("human", "q"),
                    ("function_call", '{"name": "weather", "arguments": {"city": "Köln", "days": null}}'),
                    ("observation", "8 °C"),
                    ("gpt", "a"),
                ),
                "tools": json.dumps([WEATHER]),
            },
            {},
            Chat([USER, CALLING, {"role": "tool", "content": "8 °C"}, SAID], [WEATHER]),
        ),
    ],
)
def test_sharegpt_is_messages(row: dict[str, Any], columns: dict[str, str], sample: Chat) -> None:
    assert convert(NamedRow(row, columns, "x:1"), "sharegpt") == sample
    if "messages" not in row:
        assert choose(NamedRow(row, columns, "x:1"), "auto") == "sharegpt"


@pytest.mark.parametrize(
    ("row", "form", "message"),
    [
        (
            {"conversations": "hi"},
            "sharegpt",
            r"x:1: conversations must be a list of \{from, value\}, found str 'hi'",
        ),
        (
            {"conversations": [{"from": "gpt"}]},
            "sharegpt",
            r"conversations\[0\] must have from and value, found an object with from",
        ),
        (
            {"conversations": turns(("narrator", "a"))},
            "sharegpt",
            r"x:1: conversations\[0\]\.from is 'narrator', which is not a known speaker: system, human, ",
        ),
        (
            {"conversations": turns(("gpt", None))},
            "sharegpt",
            r"conversations\[0\]\.value must be a string, found NoneType",
        ),
        (
            {"conversations": turns(("function_call", "weather(Köln)"))},
            "sharegpt",
            r"x:1: conversations\[0\]\.value must be JSON, found 'weather\(Köln\)': Expecting value",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "messages",
            r"x:1: messages\[0\]\.content\[0\] must be a text part, .*found \{'type': 'image', .*video and "
            r"audio cannot",
        ),
        (
            {"messages": [USER], "tools": "{}"},
            "messages",
            r"x:1: tools must be a list of JSON schemas .*, found \{\}",
        ),
        (
            {"messages": [USER], "tools": "[oops"},
            "messages",
            r"x:1: tools must be JSON, found '\[oops': Expecting value",
        ),
        (
            {"messages": [{**SAID, "tool_calls": {"name": "f"}}]},
            "messages",
            r"x:1: messages\[0\]\.tool_calls must be a list of calls, found dict",
        ),
        (
            {"messages": [{**SAID, "tool_calls": [{"id": "1"}]}]},
            "messages",
            r"messages\[0\]\.tool_calls\[0\] must name a function, .* found \{'id': '1'\}",
        ),
        (
            {"messages": [{**SAID, "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            "messages",
            r"tool_calls\[0\] arguments must be an object \(or its JSON text\), found '\[1\]'",
        ),
        (
            {"messages": [{**SAID, "tool_calls": [{"name": "f", "arguments": {"a": ["\udc00"]}}]}]},
            "messages",
            r"x:1: messages\[0\] has half of a surrogate pair \('\\udc00'\), which is not a character",
        ),
    ],
)
def test_chats_that_do_not_fit_are_told(row: dict[str, Any], form: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        convert(NamedRow(row, {}, "x:1"), form)


CONTEXT = {**SAID, "train": False}


@pytest.mark.parametrize(
    ("row", "form", "messages"),
    [
        ({"messages": [USER, {**SAID, "weight": 0}]}, "messages", [USER, CONTEXT]),
        ({"messages": [USER, {**SAID, "train": False, "weight": 0.0}]}, "messages", [USER, CONTEXT]),
        (
            {"messages": [{**USER, "train": None}, {**SAID, "train": True, "weight": None}]},
            "messages",
            [USER, SAID],
        ),
        ({"messages": [{**USER, "weight": 0}, SAID]}, "messages", [{**USER, "train": False}, SAID]),
        (
            {"conversations": [*turns(("human", "q")), {"from": "gpt", "value": "a", "train": False}]},
            "sharegpt",
            [USER, CONTEXT],
        ),
        (
            {"conversations": [{"from": "function_call", "value": '{"name": "weather"}', "weight": 0}]},
            "sharegpt",
            [
                {
                    **CALLING,
                    "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": {}}}],
                    "train": False,
                }
            ],
        ),
    ],
)
def test_turns_say_themselves_whether_they_are_trained(
    row: Any, form: str, messages: list[dict[str, Any]]
) -> None:
    assert convert(NamedRow(row, {}, "x:1"), form) == Chat(messages)


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (
            {**SAID, "weight": 0.5},
            r"x:1: messages\[0\]\.weight is 0\.5; a turn is either trained \(train: true or weight: 1\) or "
            r"context",
        ),
        ({**SAID, "train": "yes"}, r"messages\[0\]\.train is 'yes'; a turn is either trained"),
        (
            {**USER, "train": True},
            r"messages\[0\]\.train is True, but its role is 'user': only messages of the assistant are "
            r"trained",
        ),
        (
            {"role": "system", "content": "s", "weight": 1},
            r"messages\[0\]\.weight is 1, but its role is 'system'",
        ),
        (
            {**SAID, "train": True, "weight": 0},
            r"messages\[0\] has both train: True and weight: 0; remove one",
        ),
    ],
)
def test_turns_that_say_something_else_are_told(turn: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        convert(NamedRow({"messages": [turn]}, {}, "x:1"), "messages")


def test_content_may_be_parts_of_text_and_null_beside_tool_calls() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}
    as_text = {
        "function": {"name": "weather", "arguments": '{"city": "Köln", "days": null}'},
        "type": "function",
    }
    rows = [
        {"messages": [parts, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        {"messages": [parts, {"role": "assistant", "tool_calls": [as_text]}]},
    ]
    for row in rows:
        assert convert(NamedRow(row, {}, "x:1"), "messages") == Chat(
            [{"role": "user", "content": "one two"}, CALLING]
        )


def test_the_recipes_system_prompt_stands_before_chats_that_have_none(
    tokenizer: Path, loaded: Any, tmp_path: Path
) -> None:
    rows = [{"instruction": f"q{n}", "output": "a", "system": "mine" if n % 2 else None} for n in range(40)]
    prepared(tokenizer, rows, tmp_path / "out", system_prompt="Be brief.")
    texts = [
        loaded.decode(row["input_ids"])
        for split in ("train", "heldout")
        for row in stored(tmp_path / "out", split)
    ]
    for system in ("mine", "Be brief."):
        assert (
            sum(
                text.startswith(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nq")
                for text in texts
            )
            == 20
        )
    with pytest.raises(DataError, match=r"data\.system_prompt: empty; remove it"):
        prepared(tokenizer, rows, tmp_path / "empty", system_prompt=" ")
    with pytest.raises(
        DataError, match=r"data\.system_prompt: only chats \(.* can have one, .*format is prompt_completion"
    ):
        prepared(tokenizer, [{"prompt": "p", "completion": "c"}], tmp_path / "raw", system_prompt="Be brief.")


CALLED = Chat(
    [USER, CALLING, {"role": "tool", "content": "8"}, SAID, USER, {**CALLING, "content": "let me see"}],
    [WEATHER],
)
CALL_TEXT = '<call>weather {"city": "Köln", "days": null}</call><|im_end|>'


def test_tool_calls_reach_the_template_and_are_trained(tokenizers: Any) -> None:
    text, answers = trained(CALLED, tokenizers(WITH_TOOLS))
    assert text.startswith("<|im_start|>tools\n" + json.dumps([WEATHER]))
    # The new line belongs to the header where an answer follows it, and so is trained in no turn.
    assert answers == f"{CALL_TEXT}a<|im_end|>let me see\n{CALL_TEXT}"
    # Some templates take a tool's answer only after a call: the place of an answer is found without what
    # follows.
    strict = checking("m.role == 'tool' and not messages[loop.index0 - 1].tool_calls", "no call")
    assert trained(CALLED, tokenizers(strict + WITH_TOOLS)) == (text, answers)
    odd = WITH_TOOLS.replace(
        "{{ '<|im_end|>\n' }}", "{{ '<|eot_id|>' if message.tool_calls else '<|im_end|>\n' }}"
    )
    with pytest.raises(
        DataError,
        match=r"x:1: messages\[1\]: the characters of its tool calls cannot be identified; .* generation "
        r"marks",
    ):
        trained(CALLED, tokenizers(odd))


def test_a_calling_turn_may_be_context(tokenizers: Any) -> None:
    messages = [
        {**message, "train": False} if "tool_calls" in message else message for message in CALLED.messages
    ]
    text, answers = trained(Chat(messages, CALLED.tools), tokenizers(WITH_TOOLS))
    assert text == trained(CALLED, tokenizers(WITH_TOOLS))[0]
    assert answers == "a<|im_end|>"
    head, said = "{{ '<|im_start|>' + message['role'] }}", "message['role'] == 'assistant'"
    body = WITH_TOOLS.partition(head)[2].removesuffix("{% endfor %}")
    marked = (
        WITH_TOOLS.partition(head)[0]
        + head
        + (
            f"{{% if {said} %}}{{% generation %}}{body}{{% endgeneration %}}{{% else %}}{body}{{% endif "
            f"%}}{{% endfor %}}"
        )
    )
    assert trained(Chat(messages, CALLED.tools), tokenizers(marked)) == (text, "\na<|im_end|>\n")


def test_data_whose_answers_are_all_context_are_dropped(tokenizer: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [USER, {"role": "assistant", "content": f"a{n}", "weight": n % 4 > 0}]}
        for n in range(80)
    ]
    assert prepared(tokenizer, rows, tmp_path / "out").dropped_untrained == 20
    with pytest.raises(
        DataError,
        match=r"rows\.jsonl:1: a turn has train: false .*data\.completion_only_loss: false trains every",
    ):
        prepared(tokenizer, rows, tmp_path / "all", completion_only_loss=False)


def test_tools_of_parquet_have_no_keys_of_other_tools(tmp_path: Path) -> None:
    other = {
        "type": "function",
        "function": {"name": "time", "parameters": {"type": "object", "zone": "UTC"}},
    }
    rows = [{"messages": [USER, SAID], "tools": [WEATHER]}, {"messages": [USER, SAID], "tools": [other]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert [row for row, _ in read(Data(path=str(tmp_path / "rows.parquet")))] == rows


TOKENS = [{"input_ids": [20 + n % 9, 30, 40 + n % 50], "labels": [IGNORED, 30, IGNORED]} for n in range(60)]


def test_tokens_are_taken_as_they_are(tokenizer: Path, tmp_path: Path) -> None:
    manifest = prepared(tokenizer, TOKENS, tmp_path / "out", contract="warn")
    assert (manifest.format, manifest.rows) == ("tokens", 60)
    heldout = [{**row, "source": 0} for row in TOKENS]
    rows = stored(tmp_path / "out", "train") + stored(tmp_path / "out", "heldout")
    assert all(row in TOKENS or row in heldout for row in rows)
    assert sorted(str(row["input_ids"]) for row in rows) == sorted(str(row["input_ids"]) for row in TOKENS)
    renamed = [{"ids": row["input_ids"]} for row in TOKENS]
    manifest = prepared(tokenizer, renamed, tmp_path / "all", columns={"input_ids": "ids"}, contract="warn")
    assert manifest.train.trained_tokens == 2 * manifest.train.samples, (
        "without labels all but the first are trained"
    )


@pytest.mark.parametrize(
    ("ids", "labels", "message"),
    [
        (
            [1, 450, 2],
            None,
            r"x:1: input_ids\[1\] is 450, but the tokenizer has tokens 0 to 449; was the data tokenized for "
            r"another",
        ),
        ([1, -1], None, r"input_ids\[1\] is -1, but"),
        ([1, 2], [IGNORED], "x:1: 2 input_ids but 1 label; there must be a label for each token"),
        (
            [5, 6, 7],
            [6, 7, IGNORED],
            r"labels\[0\] is 6, but input_ids\[0\] is 5; a label is -100 .* the data must not",
        ),
        ("5 6", None, "x:1: input_ids must be a list of integers, found str '5 6'"),
        ([], None, "input_ids must be a list of integers, found list"),
        ([1, True], None, "input_ids must be a list of integers"),
        ([1, 2], [1, 2.0], "x:1: labels must be a list of integers"),
    ],
)
def test_tokens_that_do_not_fit_are_told(ids: Any, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        validated(Tokens(ids, labels), 450, "x:1")


@pytest.mark.parametrize(
    ("row", "ids", "labels"),
    [
        ({"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}, [5, 6, 7], [-100, 6, 7]),
        (
            {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1], "labels": [-100, -100, 5, 6]},
            [5, 6],
            [-100, 6],
        ),
        ({"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}, [5, 6, 7, 8], [-100, -100, 7, 8]),
        ({"input_ids": [5, 6, 7, 8], "assistant_masks": [0, 1, 0, 1]}, [5, 6, 7, 8], [-100, 6, -100, 8]),
        (
            {
                "input_ids": [5, 6, 7, 0],
                "completion_mask": [0, 1, 1, 0],
                "attention_mask": [1, 1, 1, 0],
                "labels": None,
            },
            [5, 6, 7],
            [-100, 6, 7],
        ),
        (
            {
                "input_ids": [5, 6],
                "special_tokens_mask": [1, 0],
                "token_type_ids": [0, 0],
                "position_ids": [0, 1],
            },
            [5, 6],
            [-100, 6],
        ),
    ],
)
def test_masks_of_tokens_are_read(row: dict[str, Any], ids: list[int], labels: list[int]) -> None:
    sample = convert(NamedRow(row, {}, "x:1"), "tokens")
    assert validated(sample, 100, "x:1") == (ids, labels)
    assert validated(sample, 100, "x:1", completion_only=False)[0] == ids


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"attention_mask": [1, 0, 1]}, "attention_mask is 0 between tokens that it attends to"),
        ({"attention_mask": [0, 0, 0]}, "attention_mask is 0 everywhere"),
        ({"attention_mask": [1, 1]}, "3 input_ids but 2 in attention_mask; there must be one for each token"),
        ({"completion_mask": [0, 1, 2]}, "completion_mask must be of 0 and 1, found 2"),
        ({"completion_mask": [0.0, 1.0, 1.0]}, "completion_mask must be a list of integers"),
        (
            {"completion_mask": [0, 0, 1], "labels": [-100, 6, 7]},
            r"labels\[1\] is trained, but completion_mask\[1\] is 0",
        ),
        (
            {"loss_mask": [0, 1, 1]},
            "column loss_mask is not read, and would change what is trained on; name it",
        ),
        (
            {"position_ids": [0, 0, 1]},
            "column position_ids is not read, .*; a row is one sample",
        ),
        ({"seq_lengths": [2, 1]}, "column seq_lengths is not read"),
    ],
)
def test_masks_of_tokens_that_contradict_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^x:1: {message}"):
        validated(convert(NamedRow({"input_ids": [5, 6, 7], **more}, {}, "x:1"), "tokens"), 100, "x:1")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [USER, {"role": "Assistant", "content": "a"}]},
            r"messages\[1\]\.role is 'Assistant'.*; write assistant$",
        ),
        (
            {"messages": [USER, {"role": "model", "content": "a"}]},
            r"messages\[1\]\.role is 'model'.*; write assistant$",
        ),
        (
            {"messages": [{"role": "critic", "content": "q"}]},
            r"messages\[0\]\.role is 'critic', which is not a known role: .*tion$",
        ),
        ({"messages": [{**USER, "images": ["a.png"]}, SAID]}, r"messages\[0\]\.images has content"),
        ({"text": "t", "audio": {"bytes": b"x"}}, "column audio has content"),
    ],
)
def test_unknown_roles_and_media_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^x:1: {message}"):
        convert(NamedRow(row, {}, "x:1"), choose(NamedRow(row, {}, "x:1"), "auto"))
    fine = {"messages": [USER, SAID], "images": [], "video": None}
    assert convert(NamedRow(fine, {}, "x:1"), "messages") == Chat([USER, SAID])


SHIPPED = (ROOT / "chat_templates/chatml.jinja").read_text()
LEFT_OUT: dict[str, tuple[str, Chat, str]] = {
    "calls": (SHIPPED, Chat([USER, CALLING]), r"messages\[1\]\.tool_calls\[0\]: the name 'weather'"),
    "tools": (SHIPPED, Chat([USER, SAID], [WEATHER]), r"tools\[0\]: the name 'weather'"),
    "names alone": (
        CHATML.replace(
            "message['content']",
            "message['content'] ~ (message.tool_calls[0].function.name if message.tool_calls else '')",
        ),
        Chat([USER, CALLING]),
        r"messages\[1\]\.tool_calls\[0\]: the argument 'city'",
    ),
    "coincidence": (
        CHATML,
        Chat([{"role": "user", "content": "weather city Köln days"}, CALLING]),
        "messages",
    ),
    "system": (
        CHATML.replace(
            "{% for message in messages %}", "{% for message in messages if message['role'] != 'system' %}"
        ),
        Chat([{"role": "system", "content": "q"}, USER, SAID]),
        r"messages\[0\] \(system\)",
    ),
    "contents beside calls": (
        WITH_TOOLS.replace(
            "{% if message['content'] %}", "{% if message['content'] and not message.tool_calls %}"
        ),
        Chat([USER, {**CALLING, "content": "Let me look."}]),
        r"messages\[1\] \(assistant\)",
    ),
}


def test_the_shipped_template_with_tools_writes_all_that_a_row_says(tokenizers: Any) -> None:
    result = {"role": "tool", "name": "weather", "content": "rain"}
    chat = Chat(
        [{"role": "system", "content": "s"}, USER, {**CALLING, "content": "Let me look."}, result, SAID],
        [WEATHER],
    )
    template = (ROOT / "chat_templates/chatml_tools.jinja").read_text()
    made = render(chat, ChatTemplate(tokenizers(template)), True, "x:1")
    trained = [made.text[start:end] for start, end in made.spans]
    assert made.text.startswith("<|im_start|>system\ns\n\n# Tools")
    assert "<tool_response>\nrain\n</tool_response>" in made.text
    assert trained[0].startswith("Let me look.\n<tool_call>\n")
    assert "Köln" in trained[0]
    assert trained[-1] == "a<|im_end|>"


@pytest.mark.parametrize("completion_only", [True, False])
@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_a_template_leaves_out_is_refused(case: str, completion_only: bool, tokenizers: Any) -> None:
    template, chat, what = LEFT_OUT[case]
    with pytest.raises(DataError, match=f"^x:1: {what}.* is not in the text that the chat template renders"):
        render(chat, ChatTemplate(tokenizers(template)), completion_only, "x:1")


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("message['content']", "message['content'] | trim"),
        CHATML.replace("message['content']", "(message['content'] | tojson)"),
        CHATML.replace("message['content']", "message['content'].split() | join(' ')"),
    ],
)
def test_templates_that_change_white_space_or_json_are_no_false_alarm(template: str, tokenizers: Any) -> None:
    contents = ("  a  b\n\nc ", '{"x": "ö",\n "y": [1]}', "<think>hm</think>so", 'tab\tand "quotes" & <i>')
    chat = Chat([{"role": "user", "content": text} for text in contents])
    assert render(chat, ChatTemplate(tokenizers(template)), False, "x:1").text


def test_calls_that_are_written_are_no_false_alarm(tokenizers: Any) -> None:
    quoted = {
        "function": {
            "name": "f",
            "arguments": {"q": 'a "b" \\ c\nö', "n": [1, {"k": None}], "e": "", "on": True},
        }
    }
    chat = Chat(
        [USER, {**CALLING, "tool_calls": [CALL, quoted]}, {"role": "tool", "content": "ok"}, SAID], [WEATHER]
    )
    assert render(chat, ChatTemplate(tokenizers(WITH_TOOLS)), True, "x:1").spans


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "q"},
        {"type": "text", "value": "q"},
        {"type": "text", "content": "q"},
        {"text": "q"},
    ],
)
def test_text_parts_have_their_text_under_any_of_three_names(part: dict[str, str]) -> None:
    assert convert(
        NamedRow({"messages": [{"role": "user", "content": [part]}, SAID]}, {}, "x:1"), "messages"
    ) == Chat([USER, SAID])
    row = {"conversations": [{"from": "human", "value": [part]}, {"from": "gpt", "value": "a"}]}
    assert convert(NamedRow(row, {}, "x:1"), "sharegpt") == Chat([USER, SAID])


def test_instruction_and_input_are_joined_as_asked() -> None:
    row = {
        "instruction": "Add.",
        "input": "1 and 2",
        "output": "3",
        "history": [["Hi", "Yes?"], ["Can you add?", "I can."]],
    }
    first = convert(NamedRow(row, {}, "x:1"), "instruction").messages
    assert [message["content"] for message in first] == [
        "Hi",
        "Yes?",
        "Can you add?",
        "I can.",
        "Add.\n\n1 and 2",
        "3",
    ]
    assert [message["role"] for message in first] == ["user", "assistant"] * 3
    assert convert(NamedRow(row, {}, "x:1", "\n"), "instruction").messages[4]["content"] == "Add.\n1 and 2"
    with pytest.raises(DataError, match=r"x:1: history must be a list of \[question, answer\], found 'Hi'"):
        convert(NamedRow(row | {"history": "Hi"}, {}, "x:1"), "instruction")


def test_turns_may_have_other_keys() -> None:
    row = {"said": [{"speaker": "user", "text": "q"}, {"speaker": "assistant", "text": "a"}]}
    columns = {"messages": "said", "role": "speaker", "content": "text"}
    assert convert(NamedRow(row, columns, "x:1"), "messages") == Chat([USER, SAID])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {
                "conversations": turns(("human", "q")),
                "chosen": turns(("gpt", "a"))[0],
                "rejected": turns(("gpt", "b"))[0],
            },
            "dpo",
        ),
        ({"messages": [USER], "chosen": SAID, "rejected": {**SAID, "content": "b"}}, "dpo"),
        ({"instruction": "q", "chosen": "a", "rejected": "b"}, "(data.columns: {output: chosen})"),
        (
            {"prompt": "q", "chosen_response": "a", "rejected_response": "b"},
            "(data.columns: {completion: chosen_response})",
        ),
        (
            {"instruction": "q", "output": "a", "kto_tag": False},
            "the column kto_tag says which answers are undesirable",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            "which objective: sft does not train; write objective",
        ),
    ],
)
def test_compared_answers_are_not_trained_by_mistake(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        choose(NamedRow(row, {}, "x:1"), "auto")
    assert said in str(caught.value)


def test_chats_with_preferences_beside_them_are_trained_where_they_end_with_an_answer() -> None:
    row = {"prompt": "q", "messages": [USER, SAID], "chosen": [USER, SAID], "rejected": [USER, SAID]}
    assert choose(NamedRow(row, {}, "x:1"), "auto") == "messages"


PROMPT = [USER, SAID, {"role": "user", "content": "r"}]
ANSWER = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize("form", ["auto", "prompt_completion"])
@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": PROMPT, "completion": [ANSWER]}, [USER, SAID | {"train": False}, PROMPT[2], ANSWER]),
        ({"prompt": [USER], "completion": "b"}, [USER, ANSWER]),
        (
            {"prompt": "q", "completion": [ANSWER], "system": "s"},
            [{"role": "system", "content": "s"}, USER, ANSWER],
        ),
    ],
)
def test_prompt_and_completion_of_messages_are_a_chat_of_which_the_completion_is_trained(row, messages, form):
    assert convert(NamedRow(row, {}, "x"), choose(NamedRow(row, {}, "x"), form)) == Chat(messages)


def test_prompts_of_text_after_those_of_messages_are_refused(tokenizer, tmp_path):
    rows = [{"prompt": [USER], "completion": [ANSWER]}, {"prompt": "q", "completion": "b"}]
    with pytest.raises(DataError, match=r"rows.jsonl:2: the row is text, and the first one is messages"):
        prepared(tokenizer, rows, tmp_path / "out")


def test_turns_of_sharegpt_in_messages_say_the_format():
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    with pytest.raises(
        DataError, match=r"write data.format: sharegpt and data.columns: \{conversations: messages\}"
    ):
        convert(NamedRow({"messages": turns}, {}, "x"), "messages")
    assert convert(NamedRow({"messages": turns}, {"conversations": "messages"}, "x"), "sharegpt") == Chat(
        [USER, SAID]
    )
