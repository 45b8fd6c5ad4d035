"""Settings of the section `data` that no row uses."""

from typing import Any

import pytest

from flytune import data
from flytune.errors import DataError
from tests.support.chats import checks_of, request
from tests.support.tiny import write_rows

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"Which fox, {n}?"},
            {"role": "assistant", "content": "That."},
        ],
        "instructions": f"Be quick, {n}.",
        "extra": {"tools": None},
    }
    for n in range(20)
]
TEXTS = [{"text": f"The quick brown fox {n} jumps."} for n in range(20)]


@pytest.mark.parametrize(
    ("of_source", "beside", "clauses"),
    [
        (
            {"columns": {"system": "instruction"}},
            {},
            ["columns.system: no row of {} has the column instruction"],
        ),
        ({"columns": {"system": "instructions", "tools": "extra.tools", "role": "role"}}, {}, []),
        ({}, {"add_eos_token": False}, ["data.add_eos_token: no row is raw text"]),
        ({}, {"add_bos_token": True}, ["data.add_bos_token: no row is raw text"]),
        ({}, {"system_prompt": "Be brief.", "train_on": "answers"}, []),
    ],
)
@pytest.mark.parametrize("weight", [1, 2])
def test_columns_that_no_row_has_and_settings_of_other_rows_are_named(
    of_source, beside: dict[str, Any], clauses, weight, tokenizer, tmp_path
):
    path = write_rows(tmp_path / "rows.jsonl", CHATS)
    source = {"path": str(path), "weight": weight} | of_source
    sources = request(tokenizer, sources=[source], heldout_fraction=0.2, **beside)
    manifest = data.prepare(sources, tmp_path / "data")
    section = "data.sources[0]." if of_source else ""
    assert manifest.unused == [section + clause.format(path) for clause in clauses]
    check = checks_of(tmp_path / "data").get("settings")
    assert (check.verdict if check else None) == ("warning" if clauses else None)


def test_each_setting_is_that_of_any_source_and_of_held_out_data(tokenizer, tmp_path):
    chats, texts = (write_rows(tmp_path / f"{n}.jsonl", rows) for n, rows in enumerate((CHATS, TEXTS)))
    both = {
        "sources": [{"path": str(chats)}, {"path": str(texts)}],
        "system_prompt": "x",
        "add_eos_token": False,
    }
    assert data.prepare(request(tokenizer, **both, heldout_fraction=0.2), tmp_path / "both").unused == []
    alone = request(tokenizer, sources=[{"path": str(texts)}], heldout_fraction=0.2, system_prompt="x")
    assert data.prepare(alone, tmp_path / "alone").unused == ["data.system_prompt: no row is a chat"]
    bare = write_rows(tmp_path / "bare.jsonl", [{"messages": row["messages"]} for row in CHATS])
    named = {"path": str(chats), "columns": {"system": "instructions"}, "heldout_path": str(bare)}
    assert data.prepare(request(tokenizer, **named), tmp_path / "bare").unused == [
        f"data.columns.system: no row of {bare} has the column instructions"
    ]


def test_a_split_of_files_that_have_none_is_refused(tokenizer, tmp_path):
    from datasets import Dataset, DatasetDict

    path = write_rows(tmp_path / "rows.jsonl", TEXTS)
    with pytest.raises(
        DataError, match=r"data\.dataset_split: test, but .*/rows\.jsonl is no folder of datasets"
    ):
        data.prepare(request(tokenizer, path=str(path), dataset_split="test"), tmp_path / "a")
    DatasetDict({"test": Dataset.from_list(TEXTS)}).save_to_disk(tmp_path / "saved")
    of_files = {"path": str(path), "heldout_path": str(tmp_path / "saved"), "contract": "warn"}
    for name, of_data in (("b", of_files), ("c", {"path": str(tmp_path / "saved"), "heldout_fraction": 0.2})):
        data.prepare(request(tokenizer, dataset_split="test", **of_data), tmp_path / name)
