"""Damaged lines and files: each gives a DataError or is read as it stands, and no other row is changed by
it."""

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flytune import data
from flytune.errors import DataError
from tests.fuzz.contents import check_rows
from tests.fuzz.inputs import drawn
from tests.fuzz.kinds import Samples
from tests.support.chats import CHATML_CALLING, prepared, request, stored, tokenizer_folder
from tests.support.damaged_rows import GOOD, sample_of


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return Samples(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize(
    "chunks", [range(8), pytest.param(range(8, 100), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_rows_of_damaged_files_are_what_is_there_or_refused(
    chunks: range, samples: Samples, tmp_path: Path
) -> None:
    """The inputs of the fuzz test, in this process."""
    for chunk in chunks:
        for number, one in enumerate(drawn("rows", 1, chunk, samples)):
            folder = tmp_path / f"{chunk}-{number}"
            folder.mkdir()
            with suppress(DataError):
                check_rows(samples, one, folder)


def test_what_is_stored_of_a_damaged_file_is_what_the_good_rows_give(tmp_path: Path) -> None:
    """The same through the whole of preparing, with the damaged lines set aside."""
    folder = tokenizer_folder(tmp_path / "tokenizer", CHATML_CALLING)
    for number, form in enumerate(GOOD):
        draw = random.Random(number)
        good = [json.dumps(row).encode() for row in GOOD[form]]
        # Cut short, no line is JSON.
        lines = [
            part for line in good for part in (line[: draw.randrange(1, len(line))], line, b"\xff" + line)
        ]
        for name, content in (("good", good), ("mixed", lines)):
            path = tmp_path / f"{form}-{name}.jsonl"
            path.write_bytes(b"\n".join(content))
            asked = request(folder, path=str(path), format=form, max_bad_fraction=0.7, contract="warn")
            manifest = data.prepare(asked, tmp_path / form / name)
            assert manifest.bad == len(content) - len(good)
        for split in ("train", "heldout"):
            assert stored(tmp_path / form / "mixed", split) == stored(tmp_path / form / "good", split)


def test_a_row_that_is_too_large_is_named_before_it_is_tokenized(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"text": f"row {n}"} for n in range(60)]
    rows[30] = {"text": "x" * 4_000_001}
    with pytest.raises(
        DataError, match=r"rows\.jsonl:31: a row of 4,000,001 characters, and at most 4,000,000 are tokenized"
    ):
        prepared(tokenizer, rows, tmp_path / "out")
    assert prepared(tokenizer, rows, tmp_path / "some", max_bad_fraction=0.1).bad == 1


def test_private_use_characters_that_are_used_up_are_an_error_of_ours(loaded: Any) -> None:
    text = "".join(map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0xF8000))))
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]}
    with pytest.raises(
        DataError, match="x:1: the text uses all private-use characters, two of which are needed"
    ):
        sample_of(row, "messages", loaded)
