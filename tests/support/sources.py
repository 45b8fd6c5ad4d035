"""The project's files: those that git lists, and Python files, each read and parsed once in a process."""

import ast
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT


def tracked(*arguments: str, root: Path = ROOT) -> list[str]:
    """Return the names of the files that git lists, with more arguments of `git ls-files`, and that are
    there."""
    listed = subprocess.run(
        ["git", "ls-files", *arguments], cwd=root, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.splitlines() if (root / name).is_file()]


def copy(names: Iterable[str], folder: Path, root: Path = ROOT) -> None:
    """Copy files of the project into a folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, folder / name)


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
