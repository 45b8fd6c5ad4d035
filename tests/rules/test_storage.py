"""One module opens addresses, and one writes files atomically."""

import ast

import pytest

from tests.support.paths import ROOT

FILES = sorted(path for top in ("flytune", "tasks", "workflows") for path in (ROOT / top).rglob("*.py"))
STORAGE, ATOMIC = ROOT / "flytune/storage.py", ROOT / "flytune/files.py"


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_one_module_opens_addresses(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path == STORAGE:
        assert "fsspec" in imported(tree)
    else:
        assert not {"fsspec", "s3fs", "gcsfs"} & set(imported(tree)), "use flytune.storage.Storage"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_one_module_renames_files(path):
    """A rename that puts a new file in place belongs into flytune.files.written_atomically."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        is_of_os = isinstance(node.func.value, ast.Name) and node.func.value.id == "os"
        # A str's replace has two arguments, a Path's one.
        is_rename = node.func.attr in ("rename", "replace") and (is_of_os or (len(node.args) == 1 and not node.keywords))
        assert not is_rename or path == ATOMIC, f"{path.name}:{node.lineno}: use flytune.files.written_atomically"
