"""Thousands of damaged lines and files: each gives a DataError or is read as it stands, and no other row is changed by it."""

import csv
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from flytune import data
from flytune.data import load_tokenizer
from flytune.errors import DataError
from tests.support.chats import CHATML_CALLING, request, stored, tokenizer_folder
from tests.support.damaged_rows import FLAT, GOOD, expected_of_line, outcomes, sample_of


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    asked = request(tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), CHATML_CALLING), path="unread")
    return load_tokenizer(asked.model, asked.data)


def mutated(content: bytes, draw: random.Random) -> bytes:
    """One to three random changes of some bytes: dropped, doubled, replaced, inserted, swapped for those of elsewhere."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(content) + 1)
        size = min(draw.choice([1, 1, 1, 2, 5, 20]), len(content) - at)
        part, other = content[at : at + size], draw.randrange(len(content) + 1)
        new = draw.choice(
            [
                b"",
                part * 2,
                bytes(draw.randrange(256) for _ in range(size or 1)),
                draw.choice(
                    [
                        b"\x00",
                        b"\xff",
                        b"\xed\xa0\x80",
                        b"\\ud800",
                        b"\n",
                        b"\r",
                        b"null",
                        b"[",
                        b"{",
                        b'"',
                        b"}",
                        b"1e999",
                        b"-",
                    ]
                ),
                content[other : other + size],
            ]
        )
        content = content[:at] + new + content[at + size :]
        if draw.random() < 0.05:
            content = content[:at]
    return content


def fuzz_lines(files: int, tmp_path: Path, tokenizer: Any, seed: int) -> int:
    """Files of JSON Lines, each of good lines and damaged ones in between; how many damaged ones there were."""
    damaged = 0
    for number in range(files):
        draw = random.Random(f"{seed}:{number}")
        form = draw.choice(list(GOOD))
        good = [json.dumps(row, ensure_ascii=draw.random() < 0.5).encode() for row in GOOD[form]]
        lines = []
        for line in good:
            lines += [mutated(line, draw) for _ in range(draw.choice([0, 1, 2, 3]))] + [line]
        damaged += len(lines) - len(good)
        (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
        found = dict(outcomes(tmp_path / "rows.jsonl", form, tokenizer))
        for place, line in enumerate(b"\n".join(lines).split(b"\n"), 1):
            outcome = found.pop(f"{tmp_path}/rows.jsonl:{place}", None)
            wanted = expected_of_line(line, form, tokenizer)
            assert isinstance(outcome, DataError) if wanted is DataError else outcome == wanted, (number, place, line)
            if isinstance(outcome, DataError):
                assert str(outcome).startswith((f"{tmp_path}/rows.jsonl:{place}: ", "x:1: ")), (number, place, line)
        assert not found
    return damaged


def written(form: str, kind: str, draw: random.Random) -> bytes:
    rows, out = GOOD[form], io.BytesIO()
    if kind == "parquet":
        compression = draw.choice(["none", "snappy", "zstd"])
        parquet.write_table(pa.Table.from_pylist(rows), out, compression=compression, write_page_checksum=True)
    elif kind == "json":
        return json.dumps(rows, indent=draw.choice([None, 1])).encode()
    else:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    return out.getvalue()


def fuzz_files(files: int, tmp_path: Path, tokenizer: Any, seed: int) -> None:
    """Whole files, damaged anywhere: rows or DataErrors; each sample is that of a row that a plain reader finds there."""
    for number in range(files):
        draw = random.Random(f"{seed}:{number}")
        kind = draw.choice(["parquet", "json", "csv"])
        form = draw.choice(FLAT if kind == "csv" else list(GOOD))
        content = mutated(written(form, kind, draw), draw)
        path = tmp_path / f"rows.{kind}"
        path.write_bytes(content)
        found = list(outcomes(path, form, tokenizer))
        samples = [outcome for _, outcome in found if not isinstance(outcome, DataError)]
        if kind == "parquet":
            good = [sample_of(row, form, tokenizer) for row in GOOD[form]]
            assert all(sample in good for sample in samples), f"{number}: a damaged page was read as if it were whole"
        else:
            plain = list(plain_rows(content, kind))
            told = [sample_of(row, form, tokenizer) for row in plain if fits(row, form, tokenizer)]
            assert samples == told[: len(samples)], number


def plain_rows(content: bytes, kind: str) -> Iterator[Any]:
    """Rows as the standard library reads them, as far as it can."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text = content[: content.rfind(b"\n", 0, error.start) + 1].decode("utf-8-sig")
    if kind == "csv":
        yield from (row for row in csv.DictReader(io.StringIO(text, newline="")) if None not in row)
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = [json.loads(line) for line in text.split("\n") if is_json(line)]
    if isinstance(value, dict):
        value = next((item for item in value.values() if isinstance(item, list)), [])
    yield from (row for row in value if isinstance(row, dict))


def is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def fits(row: Any, form: str, tokenizer: Any) -> bool:
    try:
        sample_of(row, form, tokenizer)
    except DataError:
        return False
    return True


def test_damaged_lines(tmp_path: Path, tokenizer: Any) -> None:
    assert fuzz_lines(40, tmp_path, tokenizer, seed=1) > 400


def test_damaged_files(tmp_path: Path, tokenizer: Any) -> None:
    fuzz_files(150, tmp_path, tokenizer, seed=1)


@pytest.mark.slow
def test_thousands_of_damaged_lines(tmp_path: Path, tokenizer: Any) -> None:
    assert fuzz_lines(550, tmp_path, tokenizer, seed=2) > 8000


@pytest.mark.slow
def test_thousands_of_damaged_files(tmp_path: Path, tokenizer: Any) -> None:
    fuzz_files(2000, tmp_path, tokenizer, seed=2)


def test_what_is_stored_of_a_damaged_file_is_what_the_good_rows_give(tmp_path: Path) -> None:
    """The same through the whole of preparing, with the damaged lines set aside."""
    folder = tokenizer_folder(tmp_path / "tokenizer", CHATML_CALLING)
    for number, form in enumerate(GOOD):
        draw = random.Random(number)
        good = [json.dumps(row).encode() for row in GOOD[form]]
        # Cut short, no line is JSON.
        lines = [part for line in good for part in (line[: draw.randrange(1, len(line))], line, b"\xff" + line)]
        for name, content in (("good", good), ("mixed", lines)):
            (tmp_path / f"{form}-{name}.jsonl").write_bytes(b"\n".join(content))
            path = str(tmp_path / f"{form}-{name}.jsonl")
            asked = request(folder, path=path, format=form, max_bad_fraction=0.7, contract="warn")
            manifest = data.prepare(asked, tmp_path / form / name)
            assert manifest.bad == len(content) - len(good)
        for split in ("train", "heldout"):
            assert stored(tmp_path / form / "mixed", split) == stored(tmp_path / form / "good", split)


def test_a_row_that_is_too_large_is_named_before_it_is_tokenized(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer")
    rows = [{"text": f"row {n}"} for n in range(60)]
    lines = [json.dumps(row) for row in [*rows[:30], {"text": "x" * 4_000_001}, *rows[30:]]]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    asked = request(folder, path=str(tmp_path / "rows.jsonl"))
    with pytest.raises(DataError, match=r"rows\.jsonl:31: a row of 4,000,001 characters, and at most 4,000,000 are tokenized"):
        data.prepare(asked, tmp_path / "out")
    some = request(folder, path=str(tmp_path / "rows.jsonl"), max_bad_fraction=0.1)
    assert data.prepare(some, tmp_path / "some").bad == 1


def test_private_use_characters_that_are_used_up_are_an_error_of_ours(tokenizer: Any) -> None:
    text = "".join(map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0xF8000))))
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]}
    with pytest.raises(DataError, match="x:1: the text uses all private-use characters, two of which are needed"):
        sample_of(row, "messages", tokenizer)
