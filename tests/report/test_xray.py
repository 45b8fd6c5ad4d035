"""The page of the samples: what it marks is what is trained, and it holds nothing but the data."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from flytune import cli, data
from flytune.data.contract import CONTRACT
from flytune.errors import DataError
from flytune.recipe import DataRequest, Recipe
from flytune.report import xray
from flytune.report.xray_samples import sample_views
from tests.support.chats import CHATML, tokenizer_folder
from tests.support.preferences import write_preferences
from tests.support.refusing_hub import refuse_connections
from tests.support.reports import EVIL, Tags
from tests.support.stages import recipe_for
from tests.support.tiny import tiny_base, tiny_recipe, write_rows

TURNS = ["quick brown fox", "jumps over \U0001f98a\U0001f98a 日本", "line one\n\n    line two\tend"]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), CHATML)


def chats(count: int) -> list[dict[str, Any]]:
    rows = []
    for n in range(count):
        messages = []
        for number, turn in enumerate(TURNS[: 1 + n % 3]):
            messages += [
                {"role": "user", "content": f"ask {n}.{number} {EVIL}"},
                {"role": "assistant", "content": f"{turn} {n}"},
            ]
        rows.append({"messages": messages})
    return rows


def recipe(tokenizer: Path, path: Path, **changes: Any) -> Recipe:
    changes = {f"data.{name}": value for name, value in changes.items()}
    return recipe_for(
        tokenizer, "full", **{"data.path": str(path), "data.max_length": 400, "description": EVIL, **changes}
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 60 chats."""
    return write_rows(tmp_path / "chats.jsonl", chats(60))


def page_of(asked: Recipe, rows: int, path: Path) -> str:
    """The page of so many rows, as HTML."""
    return xray.recipe_page(asked, rows, path).path.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def page(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    path = write_rows(folder / "chats.jsonl", chats(60))
    return page_of(recipe(tokenizer, path), 50, folder / "deep" / "page.html")


def test_is_one_whole_page_without_anything_outside(page):
    tags = Tags(page)
    assert tags.open == []
    assert page.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags.tags}
    assert re.findall(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", page) == []
    ids = [attrs["id"] for _, attrs in tags.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["aria-labelledby"] for _, attrs in tags.tags if "aria-labelledby" in attrs} <= set(ids)
    assert all(attrs.get("scope") in ("row", "col") for attrs in tags.all("th"))


def test_what_is_in_the_data_is_escaped(page):
    tags = Tags(page)
    assert tags.all("script") == []
    assert tags.text.count("<script>alert('a')</script>") >= 6


def test_reads_the_rows_asked_for_and_says_so(page):
    assert "50 rows were read (only the first rows; use --rows to read more)" in Tags(page).text


def marked(page: str) -> list[tuple[str, str]]:
    """Characters and their classes, of the first sample on the page."""
    first = re.search(r'<p class="tokens">(.*?)</p>', page, re.DOTALL)
    assert first
    found = re.findall(r'<i(?: class="([^"]*)")? title="[^"]*">(.*?)</i>', first[1], re.DOTALL)
    return [(html.unescape(text).replace("\n", ""), kind) for kind, text in found]


def test_marks_are_the_answers_and_their_ends(page):
    pieces = marked(page)
    number = re.search(r"ask (\d+)\.0", "".join(text for text, _ in pieces))
    assert number
    n = int(number[1])
    said = "".join(text for text, kind in pieces if "t" in kind.split())
    visible = [turn.replace("\n", "↵").replace("\t", "⇥") for turn in TURNS[: 1 + n % 3]]
    assert said == "".join(f"{turn} {n}<|im_end|>" for turn in visible)
    assert {text for text, kind in pieces if "s" in kind.split()} == {"<|im_start|>", "<|im_end|>"}
    assert not any("\ufffd" in text for text, _ in pieces)


def test_all_parts_are_there(page):
    text = Tags(page).text
    for shown in (
        "All 21 checks pass",
        "Stops the run",
        "Sample 6",
        "Longest sample",
        "of it is padding",
        "Sample lengths",
    ):
        assert shown in text, shown
    assert "{% for message in messages %}" in text


def test_each_of_several_sources_is_limited(tokenizer, path, tmp_path):
    other = write_rows(tmp_path / "text.jsonl", [{"text": f"fox {n} jumps over"} for n in range(60)])
    asked = recipe(tokenizer, path).model_dump(mode="json")
    asked["data"] |= {
        "path": None,
        "sources": [{"path": str(path), "max_samples": 10}, {"path": str(other), "weight": 2}],
    }
    made = page_of(Recipe.model_validate(asked), 30, tmp_path / "page.html")
    assert Tags(made).open == []
    text = re.sub(r"\s+", " ", Tags(made).text)
    assert "40 rows were read" in text
    assert f"{path} messages 11010" in text
    assert re.search(rf"{other} text 2305\d", text)


def test_heldout_rows_are_limited_too(tokenizer, path, tmp_path):
    others = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"fizz {n}"}]}
        for n in range(90)
    ]
    heldout = write_rows(tmp_path / "heldout.jsonl", others)
    asked = recipe(tokenizer, path, heldout_path=str(heldout))
    text = Tags(page_of(asked, 20, tmp_path / "page.html")).text
    assert "40 rows were read" in text
    assert "20 training samples, 20 held out" in text
    assert re.search(rf"{heldout} messages\s+1\s*20\s*20", text)
    text = Tags(page_of(asked, 90, tmp_path / "page.html")).text
    assert "90 held out" in text
    others[7]["messages"] = []
    write_rows(heldout, others)
    with pytest.raises(DataError, match=rf"^{heldout}:8: messages must be a list"):
        xray.recipe_page(asked, 20, tmp_path / "other.html")
    with pytest.raises(DataError, match=rf"^{heldout}:8: messages must be a list"):
        xray.recipe_page(asked, 90, tmp_path / "other.html")
    with heldout.open("a") as file:
        file.write("oops")
    assert xray.recipe_page(
        recipe(tokenizer, path, heldout_path=str(heldout), max_bad_fraction=0.5), 90, tmp_path / "last.html"
    )


def test_cut_samples_say_so_and_a_broken_contract_is_shown(tokenizer, path, tmp_path):
    made = page_of(
        recipe(tokenizer, path, max_length=150, max_truncated_fraction=0.1), 60, tmp_path / "page.html"
    )
    text = Tags(made).text
    assert "cut at 150 tokens" in text
    assert "2 of 21 checks fail and would stop the run" in text
    assert "✗ stop" in text


def test_packed_blocks_are_drawn_with_their_borders(tokenizer, tmp_path):
    path = write_rows(tmp_path / "text.jsonl", [{"text": f"fox {n} " * 9} for n in range(300)])
    page = page_of(recipe(tokenizer, path, packing=True, max_length=512), 300, tmp_path / "page.html")
    assert "The samples of a block do not see each other" in page
    assert page.count("<line ") > 8
    assert 'class="strips"' in page


def test_strips_say_how_much_is_padding():
    svg = xray.draw_strips([[[False, True, True], [False, True]], [[False] * 8]], 8)
    assert "13 of 16 tokens are in samples, the rest is padding" in svg
    # Samples end before padding, which is hatched; where a strip is full its end is not a border.
    assert svg.count("<line ") == 2
    assert svg.count('fill="url(#padding-hatch)"') == 1
    assert svg.count('fill="var(--blue)"') == 2


def test_long_samples_are_shown_at_both_ends(tokenizer, tmp_path):
    path = write_rows(tmp_path / "text.jsonl", [{"text": f"fox {n} " * 400} for n in range(60)])
    made = page_of(recipe(tokenizer, path, max_length=2000), 60, tmp_path / "page.html")
    assert re.search(r"… [\d,]+ tokens, [\d,]+ of them trained, are not shown …", made)


def test_the_report_has_the_contract_and_samples(tokenizer, path, tmp_path):
    asked = recipe(tokenizer, path)
    data.prepare(DataRequest.of(asked, "x"), tmp_path / "dataset")
    section = xray.section(tmp_path / "dataset")
    tags = Tags(section)
    assert tags.open == []
    assert tags.all("script") == []
    assert "Sample 2" in tags.text
    assert "Sample 3" not in tags.text
    assert "end marker" in tags.text
    (tmp_path / "dataset" / CONTRACT).unlink()
    assert xray.section(tmp_path / "dataset") == ""
    # The page of a folder without one counts anew.
    assert "Contract" in xray.page(tmp_path / "dataset", asked, tmp_path / "page.html").read_text(
        encoding="utf-8"
    )


def test_the_command_writes_the_page_and_prints_its_path(tokenizer, path, tmp_path, capsys, monkeypatch):
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe(tokenizer, path).to_yaml(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["xray", str(file), "--rows", "20"]) == 0
    said = capsys.readouterr()
    assert said.out == ".xray/tiny.html\n"
    assert "All 21 checks pass" in said.err
    assert "20 rows were read" in Path(".xray/tiny.html").read_text(encoding="utf-8")
    assert cli.main(["xray", str(file), "--rows", "0"]) == 1
    assert "--rows 0: must be 1 to 1e+12" in capsys.readouterr().err


def test_a_folder_without_its_tokenizer_is_told(tokenizer, path, tmp_path):
    asked = recipe(tokenizer, path)
    data.prepare(DataRequest.of(asked, "x"), tmp_path / "dataset")
    (tmp_path / "dataset" / "tokenizer").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"dataset: no tokenizer/ in the folder; prepare the data again"):
        xray.page(tmp_path / "dataset", asked, tmp_path / "page.html")


def test_a_model_that_is_not_there_is_told_without_a_page(path, tmp_path):
    with pytest.raises(DataError, match=r"model.name_or_path: .*no such folder"):
        xray.recipe_page(recipe(tmp_path / "nothing", path), 20, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_rows_of_a_split_for_evaluation_are_limited_too(tokenizer, tmp_path, monkeypatch):
    def rows(source, name, key="data", split=None):
        made = chats(60) if split is None else [{"messages": chat["messages"][:2]} for chat in chats(90)]
        return ((row, f"{name}[{split}], row {number}") for number, row in enumerate(made, 1))

    monkeypatch.setattr("flytune.data.readers.hub_rows", rows)
    asked = recipe(tokenizer, tmp_path / "unread").model_dump(mode="json")
    asked["data"] |= {
        "path": None,
        "dataset_name": "owner/chats",
        "eval_split": "test",
        "heldout_fraction": 0.02,
    }
    text = Tags(page_of(Recipe.model_validate(asked), 20, tmp_path / "page.html")).text
    assert "20 training samples, 20 held out" in text
    assert re.search(r"owner/chats\[test\] messages\s+1\s*20\s*20", text)


def test_a_pair_has_both_answers_side_by_side_from_where_they_part(tmp_path: Path) -> None:
    rows = write_preferences(tmp_path / "pairs.jsonl", 24)
    recipe = Recipe.model_validate(tiny_recipe(tiny_base(tmp_path), rows, {"objective": "dpo"}))
    folder = tmp_path / "dataset"
    data.prepare(DataRequest.of(recipe, "x"), folder)
    manifest = data.read_manifest(folder)
    views = sample_views(folder, manifest, xray._tokenizer(folder), 3)
    assert views[0].title.startswith("Longest pair")
    assert {"Pair 1", "Pair 2", "Pair 3"} <= {title for view in views for title in view.title.split("; ")}
    texts = [json.loads(line) for line in rows.read_text().splitlines()]
    for view in views:
        parts = [view.pieces, *(pieces for _, pieces in view.sequences)]
        before, *both = ("".join(piece.text for piece in pieces) for pieces in parts)
        assert before.startswith("Question ")
        assert "add the numbers.↵" in before
        (chosen, rejected) = both
        assert chosen[0] != rejected[0], "they part at once"
        assert any(
            (before + chosen).startswith((row["prompt"] + row["chosen"]).replace("\n", "↵"))
            and (before + rejected).startswith((row["prompt"] + row["rejected"]).replace("\n", "↵"))
            for row in texts
        )
        assert not any("t" in piece.kind.split() for piece in view.pieces if "Question" in piece.text)
        assert all("t" in piece.kind.split() for _, pieces in view.sequences for piece in pieces), (
            "answers are trained"
        )
    page = xray.page(folder, recipe, tmp_path / "x.html").read_text()
    assert '<div class="chosen">' in page
    assert '<div class="rejected">' in page


LONG = " ".join(f"fox {n} jumps over" for n in range(100))


def faulty(folder: Path) -> Path:
    """Write 60 chats: 3 rows are bad, 20 are long, 2 have no answer within 150 tokens, all have a score."""
    rows: list[dict[str, Any]] = [{**row, "score": 1} for row in chats(60)]
    for number in (5, 25, 45):
        rows[number]["messages"] = [
            {"role": "user", "content": f"<b>{number}</b>"},
            {"role": "wizard", "content": "x"},
        ]
    for number in range(30, 42):
        rows[number]["messages"] = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": f"{number} {LONG}"},
        ]
    rows[50]["messages"] = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "too late"}]
    return write_rows(folder / "chats.jsonl", rows)


def headings(page: str) -> list[str]:
    return [html.unescape(found) for found in re.findall(r"<h3>(.*?)</h3>", page)]


def test_of_texts_with_labels_nothing_is_said_of_trained_tokens_or_packing(tmp_path: Path) -> None:
    rows = [{"text": f"Text {n}." + " More of it." * (n % 3 * 9), "label": n % 2} for n in range(40)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    content = tiny_recipe(tiny_base(tmp_path), path, {"objective": "classify"})
    text = Tags(page_of(Recipe.model_validate(content), 40, tmp_path / "page.html")).text
    assert "of it is padding" in text
    assert not re.search(r"\d trained|tokens? are trained|data\.packing|end marker", text)


def test_bad_rows_are_on_the_page_and_their_list_stays(tokenizer, tmp_path):
    path = faulty(tmp_path)
    asked = recipe(tokenizer, path, max_bad_fraction=0.1)
    made = xray.recipe_page(asked, 60, tmp_path / "page.html")
    assert (made.bad, made.rows, made.bad_rows) == (3, 60, tmp_path / "page.bad_rows.jsonl")
    text = Tags(made.path.read_text(encoding="utf-8")).text
    assert f"3 of 60 rows are bad, and not trained on. All of them are listed in {made.bad_rows}" in text
    for line in (6, 26, 46):
        assert re.search(rf"{path}:{line}\s*messages\[1\].role is 'wizard'", text)
    listed = [json.loads(line) for line in made.bad_rows.read_text().splitlines()]
    assert [(row["file"], row["line"]) for row in listed] == [
        (str(path), 6),
        (str(path), 26),
        (str(path), 46),
    ]
    few = recipe(tokenizer, path, max_bad_fraction=0.01)
    with pytest.raises(
        DataError, match=rf"3 of 60 rows are bad.*all of them are listed in {tmp_path}/few.bad_rows.jsonl"
    ):
        xray.recipe_page(few, 60, tmp_path / "few.html")
    assert len((tmp_path / "few.bad_rows.jsonl").read_text().splitlines()) == 3
    good = recipe(tokenizer, write_rows(tmp_path / "good.jsonl", chats(60)))
    assert xray.recipe_page(good, 60, tmp_path / "page.html").bad_rows is None
    assert not (tmp_path / "page.bad_rows.jsonl").exists(), "a list of an earlier page would mislead"


def test_bad_rows_of_limited_heldout_data_have_their_places(tokenizer, path, tmp_path):
    rows: list[Any] = chats(90)
    rows[8]["messages"] = []
    heldout = write_rows(tmp_path / "heldout.jsonl", rows)
    lines = heldout.read_text().splitlines()
    lines[2] = "no json"
    heldout.write_text("\n".join(lines) + "\n")
    made = xray.recipe_page(
        recipe(tokenizer, path, heldout_path=str(heldout), max_bad_fraction=0.5), 20, tmp_path / "page.html"
    )
    listed = [json.loads(line) for line in made.bad_rows.read_text().splitlines()]
    assert {(row["file"], row["line"]) for row in listed} == {(str(heldout), 3), (str(heldout), 9)}
    assert made.rows == 40


def test_another_file_is_not_replaced_by_the_list(tokenizer, path, tmp_path):
    (tmp_path / "page.bad_rows.jsonl").write_text('{"mine": 1}\n')
    with pytest.raises(
        DataError, match=r"page.bad_rows.jsonl: exists already, and is not a list of bad rows; move it"
    ):
        xray.recipe_page(recipe(tokenizer, path), 20, tmp_path / "page.html")


@pytest.mark.parametrize("too_long", ["truncate", "drop"])
def test_what_one_looks_for_is_shown_before_the_first_samples(too_long, tokenizer, tmp_path):
    asked = recipe(tokenizer, faulty(tmp_path), max_bad_fraction=0.1, max_length=150, too_long=too_long)
    page = page_of(asked, 60, tmp_path / "page.html")
    assert Tags(page).open == []
    titles = headings(page)
    kind = "Cut" if too_long == "truncate" else "Dropped, too long"
    before = (
        ["Dropped, without a trained token", *["Cut"] * 3]
        if too_long == "truncate"
        else ["Dropped, too long"] * 3
    )
    assert titles[: len(before)] == before
    assert titles.index(next(title for title in titles if "Longest" in title)) < titles.index("Sample 6")
    assert titles[-1].endswith("Sample 6")
    assert page.index("Bad rows</h2>") < page.index(f"<h3>{kind}</h3>")
    assert re.search(rf"{tmp_path}/chats.jsonl:\d+: [\d,]+ tokens, of which [\d,]+ ", page)
    assert "cut at 150 tokens" in page
    assert '<i class="l"' in page, "what follows the cut is shown"


def test_flagged_samples_are_shown(tokenizer, tmp_path):
    rows = [{"input_ids": [5, 6, 7, 8 + n], "labels": [-100, 6, 7, 8 + n]} for n in range(60)]
    rows[7] = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    made = page_of(recipe(tokenizer, write_rows(tmp_path / "rows.jsonl", rows)), 60, tmp_path / "page.html")
    titles = headings(made)
    assert any("Flagged: end marker" in title for title in titles)
    assert "Flagged" in titles[0]


def test_the_verdict_is_by_tokens_too(tokenizer, tmp_path):
    rows = chats(300)
    rows[30]["messages"] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": LONG * 40}]
    made = xray.recipe_page(
        recipe(tokenizer, write_rows(tmp_path / "rows.jsonl", rows)), 300, tmp_path / "page.html"
    )
    checks = {check.name: check for check in made.contract.checks}
    assert checks["truncated"].verdict == "ok", "one of 300 samples"
    assert checks["truncated tokens"].verdict == "warning"
    manifest_lost = checks["truncated tokens"]
    assert manifest_lost.count / manifest_lost.of > 0.3
    assert f"({100 * manifest_lost.count / manifest_lost.of:.3g} %)" in manifest_lost.found


@pytest.mark.parametrize(("contract", "code"), [("stop", 1), ("warn", 0)])
def test_the_terminal_says_what_would_stop_the_run(contract, code, tokenizer, tmp_path, capsys, monkeypatch):
    file = tmp_path / "recipe.yaml"
    changes = {
        "max_bad_fraction": 0.1,
        "max_length": 150,
        "max_truncated_fraction": 0.05,
        "contract": contract,
    }
    file.write_text(recipe(tokenizer, faulty(tmp_path), **changes).to_yaml(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["xray", str(file)]) == 0
    said = capsys.readouterr()
    effect = "would stop the run" if code else "stop nothing, because of data.contract: warn"
    assert f"2 of 21 checks fail and {effect}: truncated, truncated tokens.\n" in said.err
    assert "3 of 60 rows are bad; all of them are listed in .xray/tiny.bad_rows.jsonl" in said.err
    assert Path(".xray/tiny.bad_rows.jsonl").is_file()
    assert effect in Path(".xray/tiny.html").read_text(encoding="utf-8")
    assert cli.main(["xray", str(file), "--check"]) == code


def test_a_hub_that_does_not_answer_is_asked_once(
    path: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe(Path("owner/unknown"), path).to_yaml())
    tried = refuse_connections(monkeypatch, tmp_path / "cache")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert cli.main(["xray", str(file)]) == 1
    assert tried == [("hub.invalid", 443)]
    assert (
        "owner/unknown: not on this machine, and the hub cannot be reached (no network?)"
        in capsys.readouterr().err
    )
