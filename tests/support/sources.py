"""The project's Python files, each read and parsed once in a process, for the rules that look at all of
them."""

import ast
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def files(*folders: str) -> list[Path]:
    """Return the Python files of folders of the project, in the order of their names."""
    found = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in folders}
    assert all(found.values()), found
    return [path for paths in found.values() for path in paths]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))
