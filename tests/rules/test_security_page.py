"""The threats in docs/security.md are held by code that exists, and by files that have tests."""

import re

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| (?!from|-)[^|]+\|[^|]+\|[^|]+\|[^|]+\|$", line)]


def test_the_table_is_found():
    assert len(ROWS) > 15


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[2].strip()[:40])
def test_a_threat_is_held_by_what_the_page_names(row):
    held = row.split("|")[4]
    named = re.findall(r"`((?:flytune|tasks|tests|training_estimates)/[\w/]+\.py)(?:: (\w+))?`", held)
    assert named or "make " in held
    for path, name in named:
        text = (ROOT / path).read_text()
        assert not name or re.search(rf"^(def|class) {name}\b", text, re.MULTILINE), f"{path}: {name}"
        assert not path.startswith("tests/") or re.search(r"^def test_", text, re.MULTILINE), path
    assert "make " in held or any(path.startswith("tests/") for path, _ in named)
