"""One module opens addresses, and one writes files atomically."""

import re

import pytest

from tests.support.sources import files, name_of

TEXTS = {
    name_of(path): path.read_text(encoding="utf-8")
    for path in files("flytune", "training_estimates", "tasks", "workflows")
}
OPENS = re.compile(r"^\s*(?:import|from) (?:fsspec|s3fs|gcsfs)\b", re.MULTILINE)
# A str's replace has two arguments, a Path's one; those of a datetime have names.
RENAMES = re.compile(r"\bos\.(?:rename|replace)\(|\.(?:rename|replace)\((?:[^(),=]|\([^()]*\))+\)")


def test_one_module_opens_addresses():
    opening = [name for name, text in TEXTS.items() if OPENS.search(text)]
    assert opening == ["flytune/storage.py"], "use flytune.storage.Storage"


def test_one_module_renames_files():
    """A rename that puts a new file in place belongs into flytune.files.written_atomically."""
    assert [name for name, text in TEXTS.items() if RENAMES.search(text)] == ["flytune/files.py"]


@pytest.mark.parametrize("line", ["os.replace(a, b)", "new.rename(old)", "new.replace(Path(a, 'b'))"])
def test_a_rename_is_found(line):
    assert RENAMES.search(line)
    assert not RENAMES.search("text.replace('a', 'b'); now.replace(tzinfo=UTC)")
