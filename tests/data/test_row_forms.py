"""Keys of rows and messages that other tools read, and the forms that their documentation teaches: read, or
refused by name."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from flytune import data
from flytune.data import row_kind
from flytune.data.columns import ADVICE, PREFERENCES, NamedRow
from flytune.data.formats import Chat, Plain
from flytune.data.messages import FLAGS, MEDIA, THOUGHT_KEYS
from flytune.data.process import Sampler
from flytune.data.readers import read_path
from flytune.errors import DataError
from flytune.recipe import Source
from tests.support.chats import CHATML_CALLING, checks_of, prepared, request, stored, tokenizer_folder
from tests.support.paths import ROOT

ASK, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
OTHER = SAID | {"content": "b"}
PLAIN = Chat([ASK, SAID])
WEATHER = {"name": "weather", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": WEATHER}
CALL = {"name": "weather", "arguments": {"city": "Rome"}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
RESULT = {"role": "tool", "content": "rain"}
CALLED = Chat([ASK, CALLING, RESULT, SAID], [TOOL])
JSON_CHAT = json.dumps([ASK, SAID])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(
        tmp_path_factory.mktemp("tokenizer"), CHATML_CALLING.replace("{% for", "{{ tools or '' }}{% for", 1)
    )


def samples(row: dict[str, Any], kind: str = "answers", **source: Any) -> list[Any]:
    """What a row is read as: the samples of one row of a recipe's source."""
    asked = Source(path="x", **source)
    found = row_kind(kind)
    sampler = Sampler(request(Path("x"), path="x"), None)  # type: ignore[arg-type]
    read = sampler._read(row, asked, "x:1", None) if kind == "answers" else found.known(row, asked.columns)
    named = NamedRow.of(read, asked, "x:1")
    return found.content(named, found.form(named), None).samples


@pytest.mark.parametrize(
    ("row", "made"),
    [
        ({"messages": [ASK, {**SAID, "loss": False}]}, Chat([ASK, {**SAID, "train": False}])),
        ({"messages": [ASK, {**SAID, "training": False}]}, Chat([ASK, {**SAID, "train": False}])),
        ({"messages": [ASK, {**SAID, "loss_scale": 0.0}]}, Chat([ASK, {**SAID, "train": False}])),
        (
            {"messages": [{**ASK, "training": False}, {**SAID, "loss_weight": 1.0}]},
            Chat([{**ASK, "train": False}, SAID]),
        ),
        (
            {
                "messages": [
                    ASK,
                    {
                        "role": "assistant",
                        "content": None,
                        "function_call": {**CALL, "arguments": '{"city": "Rome"}'},
                    },
                    {**RESULT, "role": "function"},
                    SAID,
                ],
                "functions": [WEATHER],
            },
            CALLED,
        ),
        (
            {
                "messages": [
                    ASK,
                    {"role": "tool_call", "content": json.dumps(CALL)},
                    {"role": "tool_response", "content": "rain"},
                    SAID,
                ],
                "tools": json.dumps([TOOL]),
            },
            CALLED,
        ),
        (
            {
                "messages": [ASK, {**CALLING, "tool_calls": json.dumps(CALLING["tool_calls"])}, RESULT, SAID],
                "tools": [TOOL],
            },
            CALLED,
        ),
        (
            {
                "messages": [
                    ASK,
                    CALLING,
                    {"role": "tool", "content": {"sky": "rain", "°C": [8, None]}},
                    SAID,
                ],
                "tools": [TOOL],
            },
            Chat(
                [ASK, CALLING, {"role": "tool", "content": '{"sky": "rain", "°C": [8, null]}'}, SAID], [TOOL]
            ),
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "observation", "value": 8},
                    {"from": "gpt", "value": "a"},
                ]
            },
            Chat([ASK, {"role": "tool", "content": "8"}, SAID]),
        ),
        ({"instruction": "q", "output": "a", "tools": [TOOL]}, Chat([ASK, SAID], [TOOL])),
        ({"instruction": "q", "output": "a", "history": '[["q", "a"]]'}, Chat([ASK, SAID, ASK, SAID])),
        ({"query": "q", "response": "a", "history": [["q", "a"]]}, Chat([ASK, SAID, ASK, SAID])),
        ({"conversation": [{"human": "q", "assistant": "a"}], "system": ""}, PLAIN),
        ({"prompt": [ASK], "completion": [SAID]}, PLAIN),
        ({"prompt": json.dumps([ASK]), "completion": json.dumps([SAID]), "tools": "[]"}, PLAIN),
        ({"prompt": "[1, 2]", "completion": '[{"role": 1}]'}, Plain("[1, 2]", '[{"role": 1}]')),
        ({"messages": JSON_CHAT, "images": "[]", "chat_template_kwargs": "{}"}, PLAIN),
        ({"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}}, PLAIN),
        (
            {"messages": [json.dumps(ASK), json.dumps(SAID)], "tools": [json.dumps(TOOL)]},
            Chat([ASK, SAID], [TOOL]),
        ),
        (
            {"messages": [ASK, {"role": "assistant", "content": None, "thinking": "why"}]},
            Chat([ASK, {"role": "assistant", "content": "", "thinking": "why"}]),
        ),
    ],
)
def test_keys_of_other_tools_are_read(row: dict[str, Any], made: Any) -> None:
    assert samples(row) == [made]


@pytest.mark.parametrize(
    "row",
    [
        {
            "input": {"messages": [ASK], "tools": []},
            "preferred_output": [SAID],
            "non_preferred_output": [OTHER],
        },
        {"messages": [ASK, SAID], "rejected_response": "b"},
        {"messages": [ASK, SAID], "rejected_messages": [ASK, OTHER]},
    ],
)
def test_pairs_of_openai_and_ms_swift_are_read(row):
    assert samples(row, "pairs") == [PLAIN, Chat([ASK, OTHER])]


def test_tools_beside_pairs_of_text_are_refused():
    answers = {"chosen": "a", "rejected": "b", "tools": [TOOL]}
    with pytest.raises(DataError, match="^x:1: column tools "):
        samples({"prompt": "q", **answers}, "pairs")
    assert samples({"messages": [ASK], **answers}, "pairs") == [
        Chat([ASK, SAID], [TOOL]),
        Chat([ASK, OTHER], [TOOL]),
    ]


CHAT = {"messages": [ASK, SAID]}
TEXT = {"prompt": "q", "completion": "a"}
REFUSED = {
    **dict.fromkeys(("chat_template_kwargs", "history", *PREFERENCES, *MEDIA), CHAT),
    **dict.fromkeys(("system", "tools", "functions"), TEXT),
}


@pytest.mark.parametrize("name", REFUSED)
def test_columns_that_would_be_dropped_are_refused_by_name_unless_they_are_removed(name: str) -> None:
    row = REFUSED[name] | {name: [{"a": "b"}]}
    with pytest.raises(
        DataError,
        match=rf"^x:1: column {name} .*; or leave it out on purpose, data.remove_columns: \[{name}\]$",
    ):
        samples(row)
    assert samples(row, remove_columns=[name]) == samples(REFUSED[name])
    assert samples(REFUSED[name] | {name: None}) == samples(REFUSED[name])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"segments": [{"label": True, "text": "a"}]},
            r"segments \(axolotl's input_output\) is not read; write prompt",
        ),
        (
            {"prompt": str([ASK]), "completion": str([SAID])},
            r"prompt is the text of a Python list .*json.dumps",
        ),
        *[
            (
                {"messages": [ASK, SAID], "label": one},
                "label says which .* kto, or data.format: messages to train all",
            )
            for one in (True, 0, "false")
        ],
        ({"messages": str([ASK, SAID])}, r"messages is the text of a Python list"),
        (
            {"messages": [ASK, {**CALLING, "function_call": CALL}]},
            "has both function_call and tool_calls; remove one of them",
        ),
    ],
)
def test_what_is_not_read_is_refused_with_what_to_write(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        samples(row)


def test_chosen_answers_alone_are_trained_where_the_recipe_says_so() -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert samples(row, columns={"completion": "chosen"}) == [Plain("q", "a")]


def test_every_column_and_key_that_is_not_read_is_in_the_contract_with_its_rows(
    tokenizer: Path, tmp_path: Path
) -> None:
    meta = {f"column_{n}": "x" for n in range(30)}
    rows = [
        {"messages": [{**ASK, "name": "Ann"} if n % 2 else ASK, {**SAID, "content": f"a{n}"}], **meta}
        for n in range(20)
    ]
    rows = [row | {"margin": 0.5} for row in rows]
    prepared(tokenizer, rows, tmp_path / "a", remove_columns=["margin"])
    found = checks_of(tmp_path / "a")["left out"].found
    assert "name of messages (10 rows)" in found
    assert "margin (data.remove_columns) (20 rows)" in found
    assert all(f"{name} (20 rows)" in found for name in meta)


def mixed(folder: Path) -> datasets.Dataset:
    parts = [{"type": "text", "text": "a"}]
    rows = [
        {"messages": [ASK, {**SAID, "content": parts if n else "a"}], "tools": [TOOL] if n else []}
        for n in range(2)
    ]
    made = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    assert "arrow.json" in str(made.data.schema)
    return made


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved"])
def test_json_of_arrow_is_parsed(kind: str, tmp_path: Path) -> None:
    made, path = mixed(tmp_path), tmp_path / f"rows.{kind}"
    if kind == "parquet":
        made.to_parquet(str(path))
    else:
        made.save_to_disk(tmp_path / "rows.saved")
        next((tmp_path / "rows.saved").glob("*.arrow")).rename(path) if kind == "arrow" else None
    rows = [row for row, _ in read_path(str(path), "data.path")]
    assert [samples(row) for row in rows] == [[PLAIN], [Chat([ASK, SAID], [TOOL])]]


def test_a_value_of_the_type_json_that_is_not_is_a_bad_row(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    stored_as = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(['"a"', "{"]))
    parquet.write_table(pyarrow.table({"text": stored_as}), tmp_path / "rows.parquet")
    good, bad = (row for row, _ in read_path(str(tmp_path / "rows.parquet"), "data.path"))
    assert good == {"text": "a"}
    assert isinstance(bad, DataError)
    assert re.search(r"rows.parquet, row 2: column text has the type JSON, and a value that is not", str(bad))


def test_chats_of_a_csv_are_prepared(tokenizer: Path, tmp_path: Path) -> None:
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion", "tools"])
        writer.writeheader()
        for n in range(20):
            writer.writerow(
                {
                    "prompt": json.dumps([ASK | {"content": f"q{n}"}]),
                    "completion": json.dumps([SAID]),
                    "tools": "[]",
                }
            )
    manifest = data.prepare(request(tokenizer, path=str(tmp_path / "rows.csv")), tmp_path / "a")
    assert manifest.left_out == {}
    assert len(stored(tmp_path / "a", "train")) == manifest.train.samples
    assert manifest.format == "prompt_completion_messages"


def test_the_page_has_each_key() -> None:
    page = (
        (ROOT / "docs" / "data.md")
        .read_text(encoding="utf-8")
        .partition("## Keys of other tools")[2]
        .partition("\n## ")[0]
    )
    assert [name for name in (*ADVICE, *FLAGS, *THOUGHT_KEYS) if f"`{name}`" not in page] == []
