"""Arguments of commands, checked before any work: nothing is overwritten, and no hours are lost to a slip."""

import argparse
import os
import sys
from pathlib import Path

from flytune import limits
from flytune.errors import RecipeError, escaped

_OUTPUTS = {
    "combine": "out",
    "convert": "output",
    "fetch": "out",
    "gguf": "out",
    "infer": "out",
    "init": "out",
    "merge": "out",
    "plan": "svg",
    "reproduce": "out",
    "selftest": "keep",
    "xray": "out",
}
"""Option or argument with the path that a command writes to."""
_NUMBERS: dict[str, tuple[float, float]] = {
    "bound": (1e-9, limits.FACTOR),
    "density": (0, 1),
    "gpus": (1, limits.SHARDS),
    "max_hours": (1e-9, limits.HOURS),
    "max_price": (1e-9, limits.PRICE),
    "rank": (1, limits.COUNT),
    "rows": (1, limits.ROWS),
    "samples": (1, limits.ROWS),
    "seed": (0, limits.SEED),
    "weights": (-limits.FACTOR, limits.FACTOR),
}
"""Numbers of commands, with the smallest and largest that are taken."""
_MAY_BE_EMPTY = ("fetch", "reproduce")
"""Commands whose folder may exist while it is empty."""
_OWN_TITLE = " · x-ray</title>".encode()


def check(options: argparse.Namespace) -> None:
    """Check the numbers of a command, and the path that it writes to.

    Raises:
        RecipeError: a number is absurd; something is there that would be overwritten, or the path cannot be
            written.
    """
    for name, (least, most) in _NUMBERS.items():
        value = getattr(options, name, None)
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if number is not None and not least <= number <= most:  # NaN is neither
                raise RecipeError(f"--{name.replace('_', '-')} {number!s:.30}: must be {least:g} to {most:g}")
    given = getattr(options, _OUTPUTS.get(options.command, ""), None)
    if given is None:
        return
    path, flag = (
        Path(given),
        "OUT" if options.command in ("combine", "fetch") else f"--{_OUTPUTS[options.command]}",
    )
    where = f"{flag} {given:.300}"
    try:
        problem = _unusable(given, path) or _taken(options, path) or _unwritable(path)
    except OSError as error:
        problem = f"{error.strerror}; name another path"
    if problem:
        raise RecipeError(f"{where}: {problem}")


def _unusable(given: str, path: Path) -> str | None:
    if not given or path.name in ("", ".."):
        return "no name of a file or folder; give a path"
    try:
        given.encode()
    except UnicodeEncodeError:
        return "not UTF-8, which the libraries that write there need; give another name"
    return "a path, not an address; give a path of this machine" if "://" in given else None


def _taken(options: argparse.Namespace, path: Path) -> str | None:
    if not os.path.lexists(path):
        return None
    if path.is_symlink() and not path.exists():
        return "a link to nothing; remove it, or give another path"
    if options.command in _MAY_BE_EMPTY and path.is_dir() and not any(path.iterdir()):
        return None
    if options.command == "xray":
        if not path.is_file():
            return "not a file; give a path for the page"
        if options.force or is_own_page(path):
            return None
        return "exists already, and is not a page of xray; give another path, or --force to replace it"
    if (
        options.command == "reproduce"
        and options.remote
        and path.is_dir()
        and not (path / "recipe.yaml").exists()
    ):
        return None
    return "exists already; give a new one"


def is_own_page(path: Path) -> bool:
    """Return whether a file is a page that xray wrote, or is empty."""
    with path.open("rb") as file:
        start = file.read(4096)
    return not start or (start.startswith(b"<!DOCTYPE html>") and _OWN_TITLE in start)


def _unwritable(path: Path) -> str | None:
    above = path.absolute()
    if not above.exists() or not above.is_dir():
        above = above.parent
    while not os.path.lexists(above):
        above = above.parent
    if not above.is_dir():
        return f"{above} is not a folder; give another path"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"{above} cannot be written; give another path, or ask for its permission"
    for name in path.parts:
        if len(name.encode()) > os.pathconf(above, "PC_NAME_MAX"):
            return f"{name:.40}...: a name of {len(name.encode())} bytes is too long; give a shorter one"
    return None


def add_answering(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Declare the artifact that answers, and how."""
    parser.add_argument(
        "artifact",
        help="a folder, fsspec address or hf://owner/name with an artifact, or a merged model's folder",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        help=f"maximum tokens of an answer (default: {max_new_tokens:,})",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="share of the likeliest tokens that is drawn from (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawing (default: 0)")
    add_base(parser)


def show_answers(text: str) -> None:
    """Write what a model has written to the standard output."""
    # A stranger's model may write what a terminal obeys.
    sys.stdout.write(escaped(text) if sys.stdout.isatty() else text)


def add_setting(parser: argparse.ArgumentParser) -> None:
    """Declare --set."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of the recipe with another value, as training.learning_rate=1e-4; repeatable",
    )


def add_base(parser: argparse.ArgumentParser) -> None:
    """Declare the base model of an artifact, and trust in its code."""
    parser.add_argument("--base", help="the base model, instead of the one that the artifact names")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python files of the model's own (default: refuse)",
    )


def add_cluster(parser: argparse.ArgumentParser, when: str) -> None:
    """Declare the project and domain of a cluster."""
    parser.add_argument(
        "-p", "--project", default="flytesnacks", help=f"Flyte project, {when} (default: flytesnacks)"
    )
    parser.add_argument(
        "-d", "--domain", default="development", help=f"Flyte domain, {when} (default: development)"
    )
