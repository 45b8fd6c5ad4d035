"""Names of files that are read from outside: manifests, indexes, listings and adapters' folders. One check
for all of them."""

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

log = logging.getLogger(__name__)

LONGEST = 1024
"""Bytes of a name, as in object stores."""
LONGEST_PART = 255
"""Bytes between two slashes, as in file systems."""
# C0, DEL, C1, the marks that change the direction of text, and line separators: a name is shown as it is.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


class NameRefused(ValueError):
    """A name that may not be used."""


def problem(name: object) -> str | None:
    """Return why a name cannot be that of a file below the folder that lists it; None if it can."""
    if not isinstance(name, str):
        return f"must be a text; found {type(name).__name__}"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "has half of a surrogate pair"
    parts = name.split("/")
    if not name:
        return "is empty"
    if size > LONGEST or any(len(part.encode()) > LONGEST_PART for part in parts):
        return f"is longer than {LONGEST} bytes, or {LONGEST_PART} between slashes"
    if _CONTROLS.search(name):
        return "has a control character"
    if name.startswith(("/", "~")):
        return "is an absolute path"
    if "\\" in name or re.match(r"[A-Za-z]:", name) or "://" in name or "::" in name:
        return "has a backslash, a drive or a protocol"
    if {"", ".", ".."} & {part.strip() for part in parts}:
        return "leads out of its folder, or has an empty part"
    return None


def check(name: str) -> str:
    """Return a name that is that of a file below the folder that lists it.

    Raises:
        NameRefused: it is empty, absolute or too long, leads out of the folder, or has a backslash, a drive,
            a protocol or a control character.
    """
    if reason := problem(name):
        raise NameRefused(f"the name {_shown(name)} {reason}; it is not used")
    return name


FileName = Annotated[str, AfterValidator(check)]
"""Field of a record: the name of a file below the record's folder, with slashes."""


def check_list(names: Iterable[str]) -> list[str]:
    """Return names that can all be files of one folder.

    Raises:
        NameRefused: one of them is refused by `check`, is there twice, or is the folder of another.
    """
    earlier: set[str] = set()
    checked = [check(name) for name in names]
    for name in checked:
        if name in earlier:
            raise NameRefused(f"the name {_shown(name)} is there twice; it is not used")
        earlier.add(name)
    for name in checked:
        parts = name.split("/")
        folders = ["/".join(parts[:end]) for end in range(1, len(parts))]
        if above := [folder for folder in folders if folder in earlier]:
            raise NameRefused(
                f"the name {_shown(above[0])} is a file and the folder of {_shown(name)}; it is not used"
            )
    return checked


def usable(names: Iterable[str], where: str) -> list[str]:
    """Return the names of a listing that can be used; each other one is logged. "" is the listed file
    itself."""
    kept = []
    for name in names:
        if name and (reason := problem(name)):
            log.warning("%s: the name %s %s; it is left out", where, _shown(name), reason)
        else:
            kept.append(name)
    return kept


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file of a local folder, which no symbolic link leads out of that folder.

    The links of a Hugging Face cache, from snapshots/COMMIT to the blobs beside, are followed.

    Raises:
        NameRefused: `check` refuses the name, or a link leads elsewhere.
    """
    path = folder / check(name)
    home = folder.resolve()
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(path.resolve().is_relative_to(home) for home in homes):
        raise NameRefused(
            f"the name {_shown(name)} is a link that leads out of {folder.name}; it is not used"
        )
    return path


def _shown(name: Any) -> str:
    return ascii(name) if len(ascii(name)) <= 80 else f"{ascii(name)[:77]}..."
