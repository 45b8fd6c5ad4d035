"""Small files that would make large rows, or take long."""

import gzip

import pytest

from flytune.data import readers
from flytune.errors import DataError
from flytune.recipe import Source


def rows(path, **options):
    return [row for row, _ in readers.strict(readers.read(Source(path=str(path), **options)))]


@pytest.mark.parametrize("sample_by", ["document", "paragraph"])
def test_a_text_is_not_collected_beyond_the_limit(tmp_path, monkeypatch, sample_by):
    monkeypatch.setattr(readers, "LARGEST_LINE", 1000)
    with gzip.open(tmp_path / "x.txt.gz", "wb") as file:
        file.write(b"one line\n" * 100_000)
    with pytest.raises(DataError, match=f"x.txt.gz:1: a {sample_by} of more than 1,000 characters; divide it into several"):
        rows(tmp_path / "x.txt.gz", sample_by=sample_by)
    (tmp_path / "y.txt").write_text("one line\n\n" * 1000)
    assert len(rows(tmp_path / "y.txt", sample_by="paragraph")) == 1000


def test_equal_columns_are_found_among_many(tmp_path):
    # One comparison of each name with each other one would take hours.
    names = [f"a{number}" for number in range(200_000)]
    (tmp_path / "x.csv").write_text(",".join(names) + "\n")
    assert rows(tmp_path / "x.csv") == []
    (tmp_path / "x.csv").write_text(",".join([*names, "a7"]) + "\n")
    with pytest.raises(DataError, match=r"x.csv:1: the column 'a7' is there twice, as columns 8 and 200001; keep one"):
        rows(tmp_path / "x.csv")
