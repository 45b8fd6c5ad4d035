"""One module opens addresses, and one writes files atomically."""

import ast

from tests.support.sources import files, name_of, nodes_of

FILES = files("flytune", "training_estimates", "tasks", "workflows")


def imported(path):
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]


def test_one_module_opens_addresses():
    opening = [name_of(path) for path in FILES if {"fsspec", "s3fs", "gcsfs"} & set(imported(path))]
    assert opening == ["flytune/storage.py"], "use flytune.storage.Storage"


def renames(path):
    for node in nodes_of(path):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        is_of_os = isinstance(node.func.value, ast.Name) and node.func.value.id == "os"
        # A str's replace has two arguments, a Path's one.
        if node.func.attr in ("rename", "replace") and (
            is_of_os or (len(node.args) == 1 and not node.keywords)
        ):
            yield f"{name_of(path)}:{node.lineno}"


def test_one_module_renames_files():
    """A rename that puts a new file in place belongs into flytune.files.written_atomically."""
    assert {rename.partition(":")[0] for path in FILES for rename in renames(path)} == {"flytune/files.py"}
