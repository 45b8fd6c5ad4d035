"""Words for missing values in tables of text, which are trained as they are, and said."""

import csv
from pathlib import Path

import pytest

from flytune import data
from flytune.recipe import DataRequest
from tests.support.chats import checks_of, request

QUESTIONS = [[f"Question {number}?", "", f"Answer {number}."] for number in range(30)]


def written(path: Path, header: list[str], rows: list[list[str]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([header, *rows])
    return str(path)


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv"])
def test_cells_that_are_words_for_missing_values_are_said(name: str, tokenizer: Path, tmp_path: Path) -> None:
    rows = [list(row) for row in QUESTIONS]
    rows[4][2], rows[7][1], rows[9][0], rows[11][2] = "None", "nan", "N/A", "None of them."
    path = written(tmp_path / name, ["instruction", "input", "output"], rows)
    data.prepare(request(tokenizer, path=path), tmp_path / "out")
    check = checks_of(tmp_path / "out")["missing values"]
    assert check.verdict == "warning"
    assert check.found.startswith("3 of 30 rows have a cell that is ")
    assert check.found.endswith(f"the first at {path}:6: 'None'")
    assert "remove these rows, unless the word is meant" in check.advice


def test_a_label_may_be_such_a_word(tokenizer: Path, tmp_path: Path) -> None:
    labels = ["NA", "toxic"]
    rows = [[f"Text {number}.", labels[number % 2]] for number in range(30)]
    given = request(tokenizer, path=written(tmp_path / "rows.csv", ["text", "label"], rows))
    classified = {"row_kind": "classified", "classes": labels, "labelling": "single_label_classification"}
    asked = DataRequest.model_validate(given.model_dump() | classified)
    manifest = data.prepare(asked, tmp_path / "out")
    assert manifest.train.classes[0] > 0
    assert not {"missing values", "end marker"} & checks_of(tmp_path / "out").keys(), "it has no answers"
