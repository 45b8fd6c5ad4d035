"""Files of code that a submission sends to a cluster: those of the product, and no other file of the
clone."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flytune.console import step_lines
from flytune.errors import FlytuneError
from flytune.sentences import counted

PATTERNS = (
    *("flytune/**/*.py", "flytune/**/*.json", "flytune/**/*.yaml", "flytune/**/*.jinja", "flytune/py.typed"),
    *("training_estimates/*.py", "training_estimates/README.md", "training_estimates/py.typed"),
    *("tasks/**/*.py", "workflows/**/*.py", "flyte2/**/*.py", "images/*.py", "images/*.sh"),
    *("recipes/*.yaml", "recipes/recipe.schema.json", "recipes/tasks/*.yaml", "recipes/tasks/*.py"),
    *("chat_templates/*.jinja", "deepspeed_configs/*.json"),
    *("shapes.yaml", "cluster.yaml", "accelerators.yaml"),
)
"""Files of the product in a clone. What git tracks beside them, as rows in recipes/, is somebody's own."""
PLACES = tuple(dict.fromkeys(pattern.partition("/")[0] for pattern in PATTERNS))
"""Folders and files of a clone's root that are code."""
LIMIT = 5_000_000
"""Bytes that the code may have; it has 3,800,000. More is data or a model among the code."""
_SHOWN = 5
"""Names that a line or an error shows at most."""

Lister = Callable[..., list[str]]
"""Flyte's function that lists what is sent: its arguments are a folder, whether links are followed, and what
is ignored."""


def lister(upstream: Lister) -> Lister:
    """Return the function that takes the place of Flyte's own, which lists all that git does not ignore.

    A folder that is no clone of Flytune is left to `upstream`.
    """

    def list_code(folder: Any, follows_links: bool, ignored: Any = None) -> list[str]:
        root = Path(folder).absolute()
        if not (root / "flytune" / "__init__.py").is_file():
            return upstream(folder, follows_links, ignored)
        names = [name for name in of_clone(root) if ignored is None or not ignored.is_ignored(root / name)]
        size = _check_size(root, names)
        step_lines.show(
            f"code that is sent: {counted(len(names), 'file')}, {_megabytes(size)}; all else stays on this "
            "machine"
        )
        if unknown := _unknown_modules(root):
            step_lines.show(
                f"not sent, because git does not track it: {_listed(unknown)}; `git add` makes it code"
            )
        if others := sorted(set(_asked_git(root)) - _of_patterns(root)):
            step_lines.show(f"not sent, because no file of the product is like it: {_listed(others)}")
        return [str(root / name) for name in names]

    return list_code


def of_clone(root: Path) -> list[str]:
    """Return the names of the product's files in a clone, in their order.

    They are those of `PATTERNS` that git tracks; all of them in a clone that git does not know. Links are
    none: their files may be anywhere.
    """
    names, tracked = _of_patterns(root), set(_asked_git(root))
    if "flytune/__init__.py" in tracked:
        names &= tracked
    return sorted(name for name in names if (root / name).is_file() and not _is_linked(root, name))


def _of_patterns(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for pattern in PATTERNS for path in root.glob(pattern)}


def _is_linked(root: Path, name: str) -> bool:
    """Return whether a file is a link, or is in a folder that is one."""
    return (root / name).resolve() != root.resolve() / name


def _unknown_modules(root: Path) -> list[str]:
    """Return the modules in the product's folders that git does not track; none where git does not know the
    clone."""
    if "flytune/__init__.py" not in _asked_git(root):
        return []
    return [name for name in _asked_git(root, "--others", "--exclude-standard") if name.endswith(".py")]


def _asked_git(root: Path, *options: str) -> list[str]:
    """Return the names in `PLACES` that `git ls-files` lists; none where there is no git, or no
    repository."""
    command = ["git", "ls-files", "-z", *options, "--", *PLACES]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, check=False)
    except OSError:
        return []
    return done.stdout.decode(errors="surrogateescape").split("\0")[:-1] if done.returncode == 0 else []


def _check_size(root: Path, names: Sequence[str]) -> int:
    """Return the bytes of all files.

    Raises:
        FlytuneError: they are more than code has.
    """
    sizes = {name: (root / name).stat().st_size for name in names}
    size = sum(sizes.values())
    if size > LIMIT:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_SHOWN]
        lines = [f"  {name}: {_megabytes(sizes[name])}" for name in largest]
        problem = (
            f"{root}: the code to send has {_megabytes(size)}, more than the {_megabytes(LIMIT)} that "
            "code may have"
        )
        todo = (
            "move data and models to a folder beside flytune/, such as own/, from where a recipe names them"
        )
        raise FlytuneError("\n".join([f"{problem}; {todo}. The largest files:", *lines]))
    return size


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
