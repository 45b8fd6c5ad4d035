"""Every kind of file, every format, and what is said about those that cannot be read."""

import bz2
import gzip
import io
import json
import lzma
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from flytune.data import readers
from flytune.data.columns import NamedRow
from flytune.data.formats import Chat, Plain, check_columns, choose, convert
from flytune.data.readers import read, strict
from flytune.data.sources import fingerprint
from flytune.errors import DataError
from flytune.recipe import Data

ROWS = [{"instruction": f"ask {n}", "input": "", "output": f'say {n}, "so"\nön 日本'} for n in range(5)]


def rows_of(path: Path | str, **data: object) -> list[dict[str, object]]:
    return [row for row, _ in strict(read(Data(path=str(path), **data)))]


def lines(rows: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def csv_text(rows: list[dict[str, str]]) -> str:
    quoted = [['"' + cell.replace('"', '""') + '"' for cell in row.values()] for row in rows]
    return "\r\n".join([",".join(rows[0]), *(",".join(cells) for cells in quoted)]) + "\r\n"


def zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


def arrow(writer: Any) -> bytes:
    table, out = pa.Table.from_pylist(ROWS), io.BytesIO()
    with writer(out, table.schema) as opened:
        opened.write_table(table, 2)
    return out.getvalue()


def checked_pages() -> bytes:
    """Parquet whose pages are stored as they are, each with a checksum."""
    out = io.BytesIO()
    table = pa.Table.from_pylist(ROWS)
    parquet.write_table(table, out, write_page_checksum=True, use_dictionary=False, compression="none")
    return out.getvalue()


WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(lines(ROWS)),
    "a.ndjson": lambda path: path.write_bytes(lines(ROWS).replace(b"\n", b"\r\n\r\n")),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(ROWS))),
    "bom.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + lines(ROWS)),
    "a.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "wrapped.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS})),
    "lines.json": lambda path: path.write_bytes(lines(ROWS)),
    "a.csv": lambda path: path.write_bytes(csv_text(ROWS).encode()),
    "bom.csv": lambda path: path.write_bytes(b"\xef\xbb\xbf" + csv_text(ROWS).encode()),
    "A.JSONL.GZ": lambda path: path.write_bytes(gzip.compress(lines(ROWS))),
    "a.jsonl.zst": lambda path: path.write_bytes(b"".join(zstd(lines([row])) for row in ROWS)),
    "a.csv.bz2": lambda path: path.write_bytes(bz2.compress(csv_text(ROWS).encode())),
    "a.json.xz": lambda path: path.write_bytes(lzma.compress(json.dumps(ROWS).encode())),
    "stream.arrow": lambda path: path.write_bytes(arrow(pa.ipc.new_stream)),
    "file.arrow": lambda path: path.write_bytes(arrow(pa.ipc.new_file)),
    "a.parquet": lambda path: parquet.write_table(pa.Table.from_pylist(ROWS), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_each_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    assert rows_of(tmp_path / name) == ROWS


def test_folder_is_all_its_data_files_by_name(tmp_path: Path) -> None:
    for name in ("b.csv", "a.parquet", "c.jsonl"):
        WRITERS.get(name, WRITERS[f"a.{name[2:]}"])(tmp_path / name)
    (tmp_path / "README.md").write_text("no data")
    (tmp_path / "_part.jsonl").write_text("not whole")
    found = [where for _, where in read(Data(path=str(tmp_path)))]
    assert len(found) == 15
    assert found[0] == f"{tmp_path}/a.parquet, row 1"
    assert found[5] == f"{tmp_path}/b.csv:3"  # the cell goes over two lines; the reader stands on the second
    assert found[10] == f"{tmp_path}/c.jsonl:1"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_folder_of_save_to_disk(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict({"train": Dataset.from_list(ROWS[:2]), "test": Dataset.from_list(ROWS)}).save_to_disk(
        tmp_path / "more"
    )
    assert rows_of(tmp_path / "one") == ROWS
    assert rows_of(tmp_path / "more") == ROWS[:2]
    assert rows_of(tmp_path / "more", dataset_split="test") == ROWS
    with pytest.raises(DataError, match=r"more: no split dev; set data\.dataset_split to one of train, test"):
        rows_of(tmp_path / "more", dataset_split="dev")
    assert len(fingerprint(Data(path=str(tmp_path / "more")))) == 64
    (tmp_path / "one" / "dataset_info.json").write_text("{")
    with pytest.raises(DataError, match="one: looks like datasets.save_to_disk but cannot be read"):
        rows_of(tmp_path / "one")


def test_address_in_memory() -> None:
    import fsspec

    fsspec.filesystem("memory").pipe("/bucket/a.jsonl", lines(ROWS))
    assert rows_of("memory://bucket/a.jsonl") == rows_of("memory://bucket") == ROWS
    before = fingerprint(Data(path="memory://bucket"))
    assert before == fingerprint(Data(path="memory://bucket"))
    fsspec.filesystem("memory").pipe("/bucket/a.jsonl", lines(ROWS[1:]))
    assert before != fingerprint(Data(path="memory://bucket"))


def test_all_rows_are_read_unless_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": str(n)} for n in range(5000)]))
    assert len(rows_of(tmp_path / "a.jsonl")) == 5000
    assert len(rows_of(tmp_path / "a.jsonl", max_samples=7)) == 7


BAD = {
    "one.jsonl": (b'{"a": 1}\n{"a": \n', r"one\.jsonl:2: not JSON: Expecting value at column 6: \{\"a\":$"),
    "more.jsonl": (
        b'{"a": 1}\n\n[1]\nnope\n{"a": 2}\n\xff\n',
        r"more\.jsonl:3: not a JSON object but a list: \[1\] \(2 other lines of this file are bad as well\)$",
    ),
    "two.jsonl": (
        b'nope\n"x"\n',
        r"two\.jsonl:1: not JSON: .* \(1 other line of this file is bad as well\)$",
    ),
    "bytes.jsonl": (b'{"a": "\xe4"}\n', r"bytes\.jsonl:1: not UTF-8: byte 0xe4 at 7"),
    "long.jsonl": (b"x" * 500, r"long\.jsonl:1: not JSON: .*: x{77}\.\.\.$"),
    "twice.jsonl": (
        b'{"a": 1, "b": {"a": 2}, "a": 3}',
        r"twice\.jsonl:1: not JSON: the key 'a' is there twice, in columns 2 and 25",
    ),
    "cut.jsonl.zst": (zstd(lines(ROWS) * 99)[:-9], r"cut\.jsonl\.zst"),
    "cut.jsonl.xz": (
        lzma.compress(lines(ROWS))[:-9],
        r"cut\.jsonl\.xz: cannot be read: Compressed file ended",
    ),
    "cut.jsonl.bz2": (
        bz2.compress(lines(ROWS))[:-9],
        r"cut\.jsonl\.bz2: cannot be read: Compressed file ended",
    ),
    "cut.arrow": (arrow(pa.ipc.new_stream)[:-60], r"cut\.arrow: .*damaged|cut\.arrow: cannot be read"),
    "cut.json": (
        b'[\n{"a": 1},\n{"a"',
        r"cut\.json:3: not JSON: Expecting ':' delimiter at column 5: \{\"a\"$",
    ),
    "empty.json": (b"", r"empty\.json:1: not JSON: Expecting value"),
    "bytes.json": (b'["\xe4"]', r"bytes\.json: not UTF-8: byte 0xe4 at 2"),
    "object.json": (
        b'{"a": 1, "b": 2}',
        r"object\.json: a JSON file must be .* an object with 0 lists, its keys are a, b",
    ),
    "string.json": (b'"a"', r"string\.json: a JSON file must be a list of objects, .*; found a string"),
    "items.json": (
        b'[{"a": 1}, 5, null]',
        r"items\.json, item 2: not an object but a number: 5 \(1 other item of this file is bad",
    ),
    "ragged.csv": (b"a,b\n1,2\n1,2,3\n", r"ragged\.csv:3: 3 cells, but the header has 2"),
    "short.csv": (b"a,b\n1\n", r"short\.csv:2: 1 cell, but the header has 2"),
    "quote.csv": (b'a,b\n"1,2\n', r"quote\.csv:2: not CSV: unexpected end of data"),
    "bytes.csv": (b"a,b\n1,\xe4\n", r"bytes\.csv:2: not UTF-8: byte 0xe4 at 2"),
    "cut.parquet": (b"PAR1 and no more", r"cut\.parquet: a damaged Parquet file: .* \(after row 0\)"),
    "flipped.parquet": (
        checked_pages().replace(b"say 2", b"say 7"),
        r"flipped\.parquet: cannot be read: .*checksum verification failed",
    ),
    "cut.jsonl.gz": (
        gzip.compress(lines(ROWS))[:40],
        r"cut\.jsonl\.gz: cannot be read: Compressed file ended",
    ),
    "not.jsonl.gz": (b"plain text", r"not\.jsonl\.gz: cannot be read: Not a gzipped file"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_told_with_its_place(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path / name)


def test_what_is_not_there_is_told_with_what_is(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(lines(ROWS))
    (tmp_path / "notes.pdf").write_text("")
    (tmp_path / "empty").mkdir()
    for source in (lambda path: rows_of(path), lambda path: fingerprint(Data(path=str(path)))):
        with pytest.raises(
            DataError,
            match=r"data\.path: .*/tain\.jsonl: no such file or folder; the folder .* has empty, notes\.pdf, "
            r"train",
        ):
            source(tmp_path / "tain.jsonl")
        with pytest.raises(
            DataError, match=r"no such file or folder; its folder .*/nowhere does not exist either"
        ):
            source(tmp_path / "nowhere" / "train.jsonl")
        with pytest.raises(
            DataError, match=r"notes\.pdf: unknown kind of file; known are JSON Lines \(\.jsonl, \.ndjson\)"
        ):
            source(tmp_path / "notes.pdf")
        with pytest.raises(
            DataError, match=r"empty: no file of JSON Lines .* in this folder; it has nothing"
        ):
            source(tmp_path / "empty")
        with pytest.raises(DataError, match="memory://gone/a.jsonl: no such file or folder at this address"):
            source("memory://gone/a.jsonl")
        with pytest.raises(
            DataError, match="nope://bucket/a.jsonl: cannot be read: ValueError: Protocol not known: nope"
        ):
            source("nope://bucket/a.jsonl")


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_columns_of_csv_are_separated_by_what_the_header_says(mark: str, tmp_path: Path) -> None:
    plain = "\n".join(mark.join(row.values()) for row in [dict(zip(ROWS[0], ROWS[0], strict=True))]) + "\n"
    quoted = "".join(mark.join(f'"say {n}; so, {n} | {n}"' for _ in range(3)) + "\n" for n in range(3))
    (tmp_path / "a.csv").write_text(plain + quoted)
    assert rows_of(tmp_path / "a.csv")[2] == dict.fromkeys(ROWS[0], "say 2; so, 2 | 2")
    (tmp_path / "b.csv").write_text(plain + mark.join("ab") + "\n")
    name = {
        ",": "",
        ";": " (columns are separated by semicolons)",
        "\t": " (columns are separated by tabs)",
    }.get(mark, " (columns are")
    with pytest.raises(DataError, match=re.escape(f"b.csv:2: 2 cells, but the header has 3{name}")):
        rows_of(tmp_path / "b.csv")


def test_a_file_of_tabs_has_no_other_separator(tmp_path: Path) -> None:
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(b"text\nfirst, second\n"))
    (tmp_path / "b.tsv").write_bytes(b"a, b, c\td\n1\t2\n")
    assert rows_of(tmp_path / "a.tsv.gz") == [{"text": "first, second"}]
    assert rows_of(tmp_path / "b.tsv") == [{"a, b, c": "1", "d": "2"}]


@pytest.mark.parametrize(
    ("by", "texts", "places"),
    [
        ("line", ["First line,", "second.", "  Third."], [1, 2, 4]),
        ("paragraph", ["First line,\nsecond.", "  Third."], [1, 4]),
        ("document", ["First line,\nsecond.\n\n  Third."], [1]),
    ],
)
def test_a_text_file_is_lines_paragraphs_or_one_text(
    by: str, texts: list[str], places: list[int], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("First line,\nsecond.\n\n  Third.\n\n", encoding="utf-8-sig")
    found = list(read(Data(path=str(tmp_path), sample_by=by)))
    assert [row for row, _ in found] == [{"text": text} for text in texts]
    assert [where for _, where in found] == [f"{tmp_path}/a.txt:{place}" for place in places]
    (tmp_path / "a.txt").write_bytes(b"a\nb\xff\n")
    with pytest.raises(DataError, match=r"a\.txt:2: not UTF-8: byte 0xff at 1"):
        rows_of(tmp_path, sample_by=by)


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    data, heldout, template = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "t.jinja"
    for path in (data, heldout, template):
        path.write_bytes(lines(ROWS))
    recipe = Data(path=str(data), heldout_path=str(heldout), chat_template=str(template))
    before = fingerprint(recipe)
    assert re.fullmatch("[0-9a-f]{64}", before)
    for path in (data, heldout, template):
        content = path.read_bytes()
        path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
        assert fingerprint(recipe) != before
        path.write_bytes(content)
        assert fingerprint(recipe) == before
    template.unlink()
    with pytest.raises(
        DataError,
        match=r"data\.chat_template: .*/t\.jinja: no such file; the folder .* has a\.jsonl, b\.jsonl",
    ):
        fingerprint(recipe)
    heldout.unlink()
    with pytest.raises(DataError, match=r"data\.heldout_path: .*/b\.jsonl: no such file or folder"):
        fingerprint(recipe)


ASKED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "columns", "form", "sample"),
    [
        ({"messages": ASKED, "id": 3}, {}, "messages", Chat(ASKED)),
        ({"messages": [{**ASKED[0], "name": None}, ASKED[1]]}, {}, "messages", Chat(ASKED)),
        ({"prompt": "p", "completion": "c"}, {}, "prompt_completion", Plain("p", "c")),
        ({"instruction": "q", "output": "a"}, {}, "instruction", Chat(ASKED)),
        ({"instruction": "q", "input": " ", "output": "a"}, {}, "instruction", Chat(ASKED)),
        ({"instruction": "q", "input": None, "output": "a"}, {}, "instruction", Chat(ASKED)),
        (
            {"question": "q", "reply": "a"},
            {"instruction": "question", "output": "reply"},
            "instruction",
            Chat(ASKED),
        ),
        ({"chat": ASKED, "text": "t"}, {"messages": "chat"}, "messages", Chat(ASKED)),
        ({"text": "t"}, {}, "text", Plain("", "t")),
    ],
)
def test_columns_say_the_format(
    row: dict[str, object], columns: dict[str, str], form: str, sample: Chat | Plain
) -> None:
    assert choose(NamedRow(row, columns, "x:1"), "auto") == form
    assert convert(NamedRow(row, columns, "x:1"), form) == sample


@pytest.mark.parametrize(
    ("row", "form", "columns", "message"),
    [
        (
            {"a": 1, "b": 2},
            "auto",
            {},
            r"x:1: no format fits the columns a, b: messages needs messages; sharegpt needs conversations; "
            r"prompt_completion needs prompt and completion; instruction needs instruction and output; text "
            r"needs text; tokens needs input_ids\. .* data\.columns",
        ),
        (
            {"text": "t"},
            "auto",
            {"tekst": "text"},
            r"data\.columns: unknown name tekst; the known names are messages, conversations, prompt, "
            r"completion, ",
        ),
        (
            {"prompt": "p"},
            "prompt_completion",
            {},
            "x:1: column completion is missing; the columns are prompt",
        ),
        (
            {"q": "p"},
            "text",
            {"text": "body"},
            r"x:1: column body \(data\.columns\.text\) is missing; the columns are q",
        ),
        ({"text": None}, "text", {}, "x:1: text must be a string, found NoneType None"),
        ({"text": "a\ud800"}, "text", {}, "x:1: text has half of a surrogate pair"),
        ({"text": ASKED}, "text", {}, r"text must be a string, found list .*data\.columns\.messages"),
        (
            {"messages": "hi"},
            "messages",
            {},
            r"x:1: messages must be a list of \{role, content\}, found str 'hi'",
        ),
        ({"messages": []}, "messages", {}, r"x:1: messages must be a list"),
        ({"messages": ["hi"]}, "messages", {}, r"x:1: messages\[0\] must have role and content, found 'hi'"),
        (
            {"messages": [{"from": "a", "value": "b"}]},
            "messages",
            {},
            r"messages\[0\] must have role and content, found an object with from, value",
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages",
            {},
            r"x:1: messages\[0\]\.content must be a string, found NoneType",
        ),
    ],
)
def test_rows_that_do_not_fit_are_told(
    row: dict[str, object], form: str, columns: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        check_columns(columns)
        convert(NamedRow(row, columns, "x:1"), choose(NamedRow(row, columns, "x:1"), form))


def test_columns_of_one_name_in_parquet_and_arrow_are_refused(tmp_path: Path) -> None:
    table = pa.table([["a"], ["b"]], names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as opened:
        opened.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(
            DataError, match=f"{name}: the column 'text' is there twice, as columns 1 and 2; keep one"
        ):
            rows_of(tmp_path / name)


@pytest.mark.parametrize("name", ["stream.arrow", "a.jsonl.zst"])
def test_damaged_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    """Of two kinds that the fuzz test does not draw."""
    WRITERS[name](tmp_path / name)
    content = (tmp_path / name).read_bytes()
    for seed in range(60):
        draw = random.Random(seed)
        changed = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        (tmp_path / name).write_bytes(changed[: draw.choice([len(changed), draw.randrange(len(changed))])])
        with suppress(DataError):
            rows_of(tmp_path / name)


def test_lines_of_any_length_are_read_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LARGEST_LINE", 100)
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n' + b"x" * 350 + b'\n{"a": 2}\n' + b"y" * 350)
    found = list(read(Data(path=str(tmp_path / "a.jsonl"))))
    assert [row for row, _ in found if isinstance(row, dict)] == [{"a": 1}, {"a": 2}]
    assert [where for row, where in found if isinstance(row, DataError)] == [
        f"{tmp_path}/a.jsonl:{at}" for at in (2, 4)
    ]
    (tmp_path / "a.csv").write_bytes(b"a\n1\n" + b"x" * 350)
    with pytest.raises(DataError, match=r"a\.csv:3: more than"):
        rows_of(tmp_path / "a.csv")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_long_value_of_a_table_is_a_bad_row(tmp_path, monkeypatch, name):
    monkeypatch.setattr(readers, "LARGEST_LINE", 1000)
    table = pa.table({"a": ["1", "x" * 1500, "2"]})
    if name == "a.parquet":
        parquet.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_file(tmp_path / name, table.schema) as file:
            file.write_table(table)
    found = list(read(Data(path=str(tmp_path / name))))
    assert [row for row, _ in found if isinstance(row, dict)] == [{"a": "1"}, {"a": "2"}]
    assert str(found[1][0]).endswith(
        f"{name}, row 2: more than 20,000,000 bytes; divide the row into several"
    )


def test_a_value_that_all_rows_share_is_in_memory_some_times_alone(tmp_path, monkeypatch):
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 256, pa.int32()), pa.array(["a" * 1_000_000]))
    parquet.write_table(pa.table({"a": shared}), tmp_path / "a.parquet", compression="zstd")
    held = [pa.total_allocated_bytes() for _ in read(Data(path=str(tmp_path / "a.parquet")))]
    assert len(held) == 256
    assert max(held) < 128_000_000


def test_a_file_without_lines_is_not_read_to_its_end(tmp_path):
    with (tmp_path / "sparse.jsonl").open("wb") as file:
        file.truncate(3_000_000_000)
    with pytest.raises(
        DataError, match=r"sparse.jsonl: cannot be read: a line of more than 200,000,000 bytes; write one row"
    ):
        list(readers.read_path(str(tmp_path / "sparse.jsonl"), "data.path"))


@pytest.mark.parametrize("sample_by", ["document", "paragraph"])
def test_a_text_is_not_collected_beyond_the_limit(tmp_path, monkeypatch, sample_by):
    monkeypatch.setattr(readers, "LARGEST_LINE", 1000)
    with gzip.open(tmp_path / "x.txt.gz", "wb") as file:
        file.write(b"one line\n" * 100_000)
    with pytest.raises(
        DataError, match=f"x.txt.gz:1: a {sample_by} of more than 1,000 characters; divide it into several"
    ):
        rows_of(tmp_path / "x.txt.gz", sample_by=sample_by)
    (tmp_path / "y.txt").write_text("one line\n\n" * 1000)
    assert len(rows_of(tmp_path / "y.txt", sample_by="paragraph")) == 1000


def test_equal_columns_are_found_among_many(tmp_path):
    # One comparison of each name with each other one would take hours.
    names = [f"a{number}" for number in range(200_000)]
    (tmp_path / "x.csv").write_text(",".join(names) + "\n")
    assert rows_of(tmp_path / "x.csv") == []
    (tmp_path / "x.csv").write_text(",".join([*names, "a7"]) + "\n")
    with pytest.raises(
        DataError, match=r"x.csv:1: the column 'a7' is there twice, as columns 8 and 200001; keep one"
    ):
        rows_of(tmp_path / "x.csv")
