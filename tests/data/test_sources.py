"""Several sources with weights, long samples in pieces, and bad rows set aside."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytune import data
from flytune.data import sources
from flytune.data.labels import IGNORED
from flytune.data.process import shares, subsample
from flytune.data.readers import read
from flytune.data.rows.answers import split
from flytune.errors import DataError, RecipeError
from flytune.recipe import Data
from tests.support.chats import prepared, request, stored
from tests.support.tiny import write_rows

PAIRS = [{"prompt": f"ask {n}:", "completion": f" say {n}"} for n in range(200)]
TEXTS = [{"body": f"text {n}"} for n in range(100)]
CHATS = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]}
    for n in range(40)
]


@pytest.fixture
def three(tmp_path: Path) -> list[dict[str, Any]]:
    """The `sources` of three formats."""
    texts = {"path": str(write_rows(tmp_path / "texts.jsonl", TEXTS)), "columns": {"text": "body"}}
    return [
        {"path": str(write_rows(tmp_path / "pairs.jsonl", PAIRS))},
        {**texts, "weight": 0.5},
        {"path": str(write_rows(tmp_path / "chats.jsonl", CHATS)), "weight": 2.25},
    ]


def test_sources_are_drawn_by_weight(
    tokenizer: Path, loaded: Any, three: list[dict[str, Any]], tmp_path: Path
) -> None:
    asked = request(tokenizer, sources=three, system_prompt="Be brief.")
    manifest = data.prepare(asked, tmp_path / "out")
    pairs, texts, chats = manifest.sources
    assert [source.name for source in manifest.sources] == [source["path"] for source in three]
    assert [source.format for source in manifest.sources] == ["prompt_completion", "text", "messages"]
    assert [source.weight for source in manifest.sources] == [1, 0.5, 2.25]
    assert (pairs.rows, pairs.samples) == (200, 200)
    assert texts.rows == texts.samples
    assert 30 < texts.rows < 70
    assert chats.rows == 40, "each row is counted once, however often its weight repeats it"
    found = {
        split: [loaded.decode(row["input_ids"]) for row in stored(tmp_path / "out", split)]
        for split in ("train", "heldout")
    }
    copies = {split: Counter(text for text in found[split] if "<|im_start|>" in text) for split in found}
    assert set(copies["heldout"].values()) == {1}, "held-out samples are stored once"
    assert len(copies["train"]) + len(copies["heldout"]) == 40
    assert set(copies["train"].values()) == {2, 3}
    assert 0 < sum(count == 3 for count in copies["train"].values()) < 20
    assert all(text.startswith("<|im_start|>system\nBe brief.<|im_end|>") for text in copies["train"])
    assert chats.samples == sum(map(sum, (counts.values() for counts in copies.values())))
    splits = (manifest.train, manifest.heldout)
    for counts in ("samples", "tokens", "trained_tokens"):
        assert sum(getattr(source, counts) for source in manifest.sources) == sum(
            getattr(split, counts) for split in splits
        )
    assert manifest.format == "prompt_completion, text, messages"
    assert data.prepare(asked, tmp_path / "again") == manifest
    first = found["heldout"][:6]
    assert {text[:3] for text in first} == {"ask", "tex", "<|i"}, (
        "the first held-out samples are of all sources"
    )
    assert data.fingerprint(asked.data) == data.fingerprint(asked.data)
    before = data.fingerprint(asked.data)
    write_rows(tmp_path / "texts.jsonl", TEXTS[1:])
    assert data.fingerprint(asked.data) != before


def test_a_weight_draws_by_content(tmp_path: Path) -> None:
    def bodies(rows: list[dict[str, str]], share: float, seed: int = 42) -> list[str]:
        source = Data(path=str(write_rows(tmp_path / "rows.jsonl", rows)))
        return [row["body"] for row, _ in subsample(read(source), share, seed)]

    half = bodies(TEXTS, 0.5)
    assert sorted(half) == sorted(bodies(TEXTS[::-1], 0.5)), "not by place"
    assert set(bodies(TEXTS, 0.25)) < set(half) < set(bodies(TEXTS, 0.75)) < {row["body"] for row in TEXTS}
    assert set(bodies(TEXTS, 0.5, seed=1)) != set(half)
    assert bodies(TEXTS, 1) == [row["body"] for row in TEXTS]
    assert [shares(weight) for weight in (0.5, 1, 2.25)] == [[0.5], [1], [1, 1, 0.25]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"path": "a", "sources": [{"path": "b"}]},
            "data: give exactly one of path .*, dataset_name .* and sources",
        ),
        ({"sources": []}, "data: give exactly one of path"),
        ({"sources": [{"weight": 2}]}, r"data\.sources\[0\]: give exactly one of path .* and dataset_name"),
        ({"sources": [{"path": "a", "weight": 0}]}, r"data\.sources\[0\]\.weight: must be 1e-06 or greater"),
        (
            {"sources": [{"path": "a"}], "max_samples": 5, "revision": "x"},
            "data: revision, max_samples: no effect beside sources; write it into each",
        ),
        (
            {"sources": [{"path": "a", "weight": 2}], "deduplicate": True},
            "deduplicate removes the samples that a weight above 1 repeats",
        ),
    ],
)
def test_sources_that_contradict_the_rest_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    from flytune.recipe import Recipe
    from tests.support.tiny import tiny_recipe

    recipe = {**tiny_recipe(tmp_path, tmp_path), "data": changes}
    with pytest.raises(RecipeError, match=message):
        Recipe.model_validate(recipe)
    recipe["data"] = {"sources": [{"path": "a", "weight": 2}], "format": "text", "heldout_path": "b"}
    assert (
        Recipe.model_validate_json(Recipe.model_validate(recipe).model_dump_json()).data.sources[0].weight
        == 2
    )


def test_sources_are_named_in_messages(tokenizer: Path, three: list[dict[str, Any]], tmp_path: Path) -> None:
    def refused(*sources: dict[str, Any]) -> str:
        with pytest.raises(DataError) as caught:
            data.prepare(
                request(tokenizer, sources=list(sources)), tmp_path / str(len(list(tmp_path.iterdir())))
            )
        return str(caught.value)

    assert refused(three[0], {"path": "gone.jsonl"}).startswith(
        "data.sources[1].path: gone.jsonl: no such file"
    )
    assert refused(three[0], {"dataset_name": "a/b"}).startswith(
        "data.sources[1].dataset_name: a/b[train]: not on this machine"
    )
    assert refused(three[0], {**three[1], "columns": {"tekst": "a"}}).startswith(
        "data.sources[1].columns: unknown name tekst"
    )
    empty = write_rows(tmp_path / "empty.jsonl", [])
    assert refused(three[0], {"path": str(empty)}) == f"{empty}: no row was found; the file is empty"
    rare = refused(three[0], {**three[1], "weight": 1e-6})
    assert (
        rare == f"{three[1]['path']}: no row was found; the file is empty, or none was drawn at weight 1e-06"
    )


def test_manifests_of_before_are_still_read(tokenizer: Path, tmp_path: Path) -> None:
    prepared(tokenizer, PAIRS, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "manifest.json").read_text())
    for name in ("sources", "split", "bad", "left_out", "truncated_tokens", "dropped_tokens"):
        del content[name]
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(content))
    manifest = data.read_manifest(tmp_path / "out")
    assert (manifest.sources, manifest.split, manifest.bad, manifest.left_out) == ([], 0, 0, {})


labels_of = st.lists(st.booleans(), min_size=1, max_size=60)


@given(labels_of, st.integers(2, 12))
def test_pieces_train_each_trained_token_once(flags: list[bool], max_length: int) -> None:
    ids = list(range(100, 100 + len(flags)))
    labels = [IGNORED, *(token if flag else IGNORED for token, flag in zip(ids[1:], flags[1:], strict=True))]
    pieces = list(split((ids, labels), max_length))
    assert all(0 < len(piece[0]) == len(piece[1]) <= max_length for piece in pieces)
    assert [label for piece in pieces for label in piece[1] if label != IGNORED] == [
        x for x in labels if x != IGNORED
    ]
    assert sorted({token for piece in pieces for token in piece[0]}) == ids
    for part, following in pairwise(pieces):
        overlap = set(part[0]) & set(following[0])
        assert len(overlap) <= 1
        if not overlap:
            assert part[1][-1] != IGNORED or labels[part[0][0] - 100] != IGNORED, "it ends behind an answer"


def test_long_samples_are_split(tokenizer: Path, loaded: Any, tmp_path: Path) -> None:
    long = " fox" * 100
    talk = [{"role": ("user", "assistant")[n % 2], "content": f"turn {n} of this talk"} for n in range(12)]
    rows = {
        "text": [{"text": f"text {n}"} for n in range(40)] + [{"text": long}],
        "messages": [*CHATS, {"messages": talk}],
    }
    for form, content in rows.items():
        manifest = prepared(tokenizer, content, tmp_path / form, max_length=64, too_long="split")
        assert (manifest.rows, manifest.split, manifest.truncated) == (41, 1, 0)
        assert manifest.train.samples + manifest.heldout.samples > 41
        found = stored(tmp_path / form, "train") + stored(tmp_path / form, "heldout")
        assert max(len(row["input_ids"]) for row in found) <= 64
        trained = "".join(
            loaded.decode([label for label in row["labels"] if label != IGNORED]) for row in found
        )
        if form == "text":
            assert trained.count(" fox") >= 99
        for turn in talk[1::2] if form == "messages" else ():
            assert trained.count(turn["content"] + "<|im_end|>") == 1
    sides = [
        any("of this talk" in loaded.decode(row["input_ids"]) for row in stored(tmp_path / "messages", side))
        for side in ("train", "heldout")
    ]
    assert sorted(sides) == [False, True], "pieces of one row are all on one side"


def test_bad_rows_are_set_aside_when_the_recipe_says_so(tokenizer: Path, tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in PAIRS]
    bad = {0: "nope", 7: '{"prompt": "p"}', 50: "[1]", 120: '{"prompt": "p", "completion": 5}'}
    for at, line in bad.items():
        lines.insert(at, line)
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(lines))
    manifest = data.prepare(request(tokenizer, path=str(source), max_bad_fraction=0.02), tmp_path / "out")
    assert (manifest.rows, manifest.bad, manifest.sources[0].bad) == (204, 4, 4)
    whole = prepared(tokenizer, PAIRS, tmp_path / "of the good" / "good")
    assert manifest.content_sha256 == whole.content_sha256, (
        "the good rows' samples are what they would be without the bad"
    )
    assert not (tmp_path / "of the good" / "good" / "bad_rows.jsonl").exists()
    told = [json.loads(line) for line in (tmp_path / "out" / "bad_rows.jsonl").read_text().splitlines()]
    assert told == [
        {"file": str(source), "line": 1, "reason": "not JSON: Expecting value at column 1: nope"},
        {"file": str(source), "line": 8, "reason": "column completion is missing; the columns are prompt"},
        {"file": str(source), "line": 51, "reason": "not a JSON object but a list: [1]"},
        {"file": str(source), "line": 121, "reason": "completion must be a string, found int 5"},
    ]
    with pytest.raises(DataError) as caught:
        data.prepare(request(tokenizer, path=str(source), max_bad_fraction=0.019), tmp_path / "more")
    listed = tmp_path / "more" / "bad_rows.jsonl"
    assert str(caught.value).splitlines()[:2] == [
        "4 of 204 rows are bad, more than data.max_bad_fraction 0.019 allows (3); "
        f"all of them are listed in {listed}. The first:",
        f"  {source}:1: not JSON: Expecting value at column 1: nope",
    ]
    assert len(listed.read_text().splitlines()) == 4
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: not JSON: .*: nope \(1 other line of this file is bad as well\)"
    ):
        data.prepare(request(tokenizer, path=str(source)), tmp_path / "none")


def test_bad_rows_are_told_once_and_a_hopeless_source_stops_early(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("nope\n" + "".join(json.dumps(row) + "\n" for row in PAIRS))
    asked = request(tokenizer, sources=[{"path": str(source), "weight": 2}], max_bad_fraction=0.1)
    assert data.prepare(asked, tmp_path / "twice").bad == 1
    monkeypatch.setattr("flytune.data.bad_rows._GRACE_ROWS", 100)
    source.write_text("nope\n" * 500 + "".join(json.dumps(row) + "\n" for row in PAIRS * 10))
    with pytest.raises(
        DataError,
        match=r"256 of 256 rows so far are bad, more than data\.max_bad_fraction 0\.3 allows \(76\)",
    ):
        data.prepare(request(tokenizer, path=str(source), max_bad_fraction=0.3), tmp_path / "hopeless")


@pytest.mark.parametrize(("name", "place"), [("a.json", ", item 2"), ("a.csv", ":3")])
def test_bad_rows_of_other_files(name: str, place: str, tokenizer: Path, tmp_path: Path) -> None:
    texts = [f"t{n}" for n in range(50)]
    as_json = [{"text": text} for text in texts]
    as_csv = ["text,n", *(f"{text},1" for text in texts)]
    as_json.insert(1, None)
    as_csv.insert(2, "a,b,c")
    (tmp_path / name).write_text(json.dumps(as_json) if name == "a.json" else "\n".join(as_csv))
    manifest = data.prepare(
        request(tokenizer, path=str(tmp_path / name), max_bad_fraction=0.1), tmp_path / "out"
    )
    assert (manifest.rows, manifest.bad) == (51, 1)
    told = json.loads((tmp_path / "out" / "bad_rows.jsonl").read_text())
    assert (told["file"], told["line"]) == (str(tmp_path / name), int(place.strip(":,item ")))


def test_duplicates_are_left_out_when_asked(tokenizer: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"Question {index % 10}?", "completion": f" Answer {index % 10}."} for index in range(30)
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    heldout = write_rows(tmp_path / "heldout.jsonl", [*rows[:3], {"prompt": "New?", "completion": " Yes."}])
    paths = {"path": str(source), "heldout_path": str(heldout)}
    manifest = data.prepare(request(tokenizer, **paths, deduplicate=True), tmp_path / "once")
    assert (manifest.train.samples, manifest.heldout.samples, manifest.duplicates) == (10, 1, 23)
    kept = data.prepare(request(tokenizer, **paths, contract="warn"), tmp_path / "all")
    assert (kept.train.samples, kept.heldout.samples, kept.duplicates) == (30, 4, 0)


def test_all_that_lies_in_a_folder_is_read_or_named(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    write_rows(folder / "a.jsonl", PAIRS[:10])
    write_rows(folder / "more" / "b.jsonl", PAIRS[10:20])
    write_rows(other / "c.jsonl", PAIRS[20:30])
    before = sources.fingerprint(Data(path=str(folder)))
    # Hub caches, ConfigMaps and DVC have folders of links.
    (folder / "linked").symlink_to(other)
    (folder / "link.jsonl").symlink_to(write_rows(tmp_path / "blob", PAIRS[30:32]))
    for name in (
        "README.md",
        "LICENSE.txt",
        ".gitattributes",
        "_SUCCESS",
        "dataset_infos.json",
        "a.jsonl.dvc",
        ".x/y.parquet",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("no data")
    rows = [row for row, _ in read(Data(path=str(folder)))]
    assert rows == [*PAIRS[:10], *PAIRS[30:32], *PAIRS[20:30], *PAIRS[10:20]]
    assert sources.size(str(folder), "data.path") == sum(
        file.stat().st_size for file in [*folder.glob("*/*.jsonl"), folder / "a.jsonl", folder / "link.jsonl"]
    )
    linked = sources.fingerprint(Data(path=str(folder)))
    write_rows(other / "c.jsonl", PAIRS[20:31])
    assert len({before, linked, sources.fingerprint(Data(path=str(folder)))}) == 3


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("rows.txt", None, "it has rows.txt, which cannot be read, beside data; known are JSON Lines"),
        ("b.tar.gz", None, "it has b.tar.gz, which cannot be read"),
        ("b.parquet.gz", None, "it has b.parquet.gz, which cannot be read"),
        ("sub/1.png", None, "it has sub/1.png, which cannot be read"),
        ("test/b.jsonl", None, "test/b.jsonl: the folder test is named like held-out data"),
        ("rows.val.jsonl.gz", None, "rows.val.jsonl.gz: is named like held-out data"),
        ("deep/test-0-of-1.parquet", None, "deep/test-0-of-1.parquet: is named like held-out data"),
        ("_delta_log/0.json", None, "_delta_log: a Delta table"),
        ("b.jsonl", "nowhere", "b.jsonl is a link that leads nowhere; remove it"),
        ("b.jsonl", "b.jsonl", "b.jsonl is a link that leads nowhere; remove it"),
        ("loop", ".", "loop is a link to the folder itself, which is read too; remove the link"),
        ("twin", "deep", "twin is a link to the folder deep, which is read too; remove the link"),
    ],
)
def test_what_is_not_read_in_a_folder_is_named(
    name: str, target: str | None, message: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "a.jsonl", PAIRS)
    write_rows(tmp_path / "deep" / "a.jsonl", PAIRS)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    if target is None:
        (tmp_path / name).write_text("x")
    else:
        (tmp_path / name).symlink_to(target)
    with pytest.raises(DataError, match=f"^data.path: {tmp_path}: {message}"):
        list(read(Data(path=str(tmp_path))))
