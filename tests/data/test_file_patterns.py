"""Patterns in paths and in exclude: which files of a folder are read."""

import re

import pytest

from flytune.cluster import uploads
from flytune.data.readers import read
from flytune.data.sources import Wanted, divided_at_pattern, fingerprint, locate
from flytune.errors import DataError, RecipeError
from flytune.recipe import Data, Recipe
from tests.support.tiny import tiny_recipe

FILES = ("a.jsonl", "b.jsonl", "old.jsonl", "more/c.jsonl", "more/deep/d.jsonl", "test/e.jsonl")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in FILES:
        (tmp_path / "rows" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "rows" / name).write_text(f'{{"text": "{name}"}}\n')
    (tmp_path / "rows" / "notes.pdf").write_text("no data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "rows"


@pytest.mark.parametrize(
    ("path", "exclude", "names"),
    [
        ("rows/*.jsonl", [], ["a", "b", "old"]),
        ("rows/[ab].jsonl", [], ["a", "b"]),
        ("rows/?.jsonl", [], ["a", "b"]),
        ("rows/more*", [], ["c", "d"]),
        ("rows/*/*.jsonl", ["test"], ["c"]),
        ("rows/**/d*", [], ["d"]),
        ("rows/**/*.jsonl", ["test", "old*"], ["a", "b", "c", "d"]),
        ("rows", ["*.pdf", "test"], ["a", "b", "c", "d", "old"]),
        ("rows/", ["notes.pdf", "test/", "more/deep", "old.jsonl"], ["a", "b", "c"]),
        ("rows", ["*.pdf", "*/*.jsonl"], ["a", "b", "d", "old"]),
        ("rows", ["*.pdf", "**/deep/**", "test/*"], ["a", "b", "c", "old"]),
    ],
)
def test_files_of_patterns(path, exclude, names, folder):
    data = Data(path=path, exclude=exclude)
    found = sorted(row["text"].rpartition("/")[2].removesuffix(".jsonl") for row, _ in read(data))
    assert found == names
    kept = fingerprint(data)
    (folder / "notes.pdf").write_text("more")
    assert fingerprint(data) == kept
    address = f"memory://{folder}"
    assert divided_at_pattern(f"{address}/*.jsonl") == (address, "*.jsonl")


@pytest.mark.parametrize(
    ("path", "exclude", "said"),
    [
        (
            "rows/*.csv",
            [],
            "data.path: rows/*.csv: no file matches this pattern; of rows, it has a.jsonl, b.jsonl",
        ),
        ("gone/*.jsonl", [], "data.path: gone/*.jsonl: no such file or folder; the folder"),
        ("rows/*", [], "it has notes.pdf, which cannot be read, beside data"),
        ("rows", ["*.pdf"], "leave this one out (data.exclude: [test])"),
        ("rows/a.jsonl", ["b"], "one file, of which exclude leaves nothing out"),
        ("rows", ["*"], "no file of JSON Lines"),
    ],
)
def test_patterns_that_give_no_data_say_why(path, exclude, said, folder):
    with pytest.raises(DataError, match=re.escape(said)):
        list(read(Data(path=path, exclude=exclude)))


def test_an_existing_path_is_no_pattern(folder):
    (folder / "[1].jsonl").write_text('{"text": "x"}\n')
    assert locate("rows/[1].jsonl", "data.path").labels == ["rows/[1].jsonl"]
    assert divided_at_pattern("https://host/a.jsonl?download=1")[1] == ""


def test_many_patterns_for_any_folders_take_no_time():
    wanted = Wanted("/".join(["**", "a"] * 40 + ["b"]), ())
    assert not wanted.has("/".join(["a"] * 100))
    assert wanted.has("/".join([*["a"] * 100, "b"]))


def test_what_a_pattern_leaves_out_is_not_uploaded_and_one_without_use_is_told(folder):
    def recipe(path, exclude):
        return Recipe.model_validate(
            tiny_recipe(folder, path, {"data.exclude": exclude, "model.name_or_path": "owner/model"})
        )

    def names(path, exclude):
        content = uploads.of_recipe(recipe(path, exclude))
        return {one.name: sorted(one.files) for one in uploads.found({"data": content["data"]})}

    assert names("rows/*.jsonl", ["old*"]) == {"rows": ["a.jsonl", "b.jsonl"]}
    assert names("rows", ["*.pdf", "more", "test"]) == {"rows": ["a.jsonl", "b.jsonl", "old.jsonl"]}
    assert uploads.missing(recipe("rows/*.jsonl", ["old*"])) == []
    assert uploads.missing(recipe("rows/*.jsonl", ["odl*"])) == [
        "data.exclude: odl* matches nothing of rows/*.jsonl; remove it, or mend it"
    ]


def test_exclude_is_of_files(folder):
    with pytest.raises(RecipeError, match="exclude, sample_by: no effect on dataset_name"):
        Recipe.model_validate(
            tiny_recipe(
                folder, "x", {"data": {"dataset_name": "a/b", "exclude": ["x"], "sample_by": "document"}}
            )
        )
