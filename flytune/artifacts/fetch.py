"""An artifact from where it was published to this machine's disk, held against its hashes; a folder is taken as it is."""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from flytune import caches
from flytune.artifacts.publish import hub_errors
from flytune.errors import ExportError
from flytune.records.contents import CONTENTS, Contents


class Place(NamedTuple):
    """Where an artifact lies, as one reads from it."""

    read: Callable[[str], bytes]
    get: Callable[[str, str], Any]
    """A file to a path of this machine."""


def local_folder(address: str | Path) -> Path:
    """A folder of this machine with the whole artifact; a folder is taken as it is.

    `address` is a folder, an fsspec address, or hf://owner/name@REVISION; without a revision, what main holds. It is kept
    beside the hub's cache, which is the user's own.

    Raises:
        ExportError: it is no whole artifact, cannot be read, or is not what its artifact.json says.
    """
    from filelock import FileLock

    if (place := _place(address)) is None:
        return Path(str(address).removeprefix("file://"))
    content = _contents(place, address)
    folder = caches.hub_folder("artifacts") / hashlib.sha256(content).hexdigest()[:16]
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / CONTENTS).exists():
            _fetch(place, content, folder, str(address))
    return folder


def fetch(address: str, out: Path, place: Place | None = None) -> None:
    """Fetch all files of an artifact into the new folder `out`, wherever it comes from; read from `place`, where one is given.

    Raises:
        ExportError: `out` holds something; or as `local_folder`.
    """
    if out.exists() and any(out.iterdir()):
        raise ExportError(f"{out}: not empty; give a new folder")
    if (place := place or _place(address)) is None:
        raise ExportError(f"{address}: a folder of this machine already")
    _fetch(place, _contents(place, address), out, address)


def _place(address: str | Path) -> Place | None:
    """None for a folder of this machine."""
    if str(address).startswith(hub_errors.SCHEME):
        return _on_the_hub(str(address))
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(str(address))
    except Exception as error:  # each file system has errors of its own: a package that is missing, credentials
        raise _unread(address, error) from error
    if "file" in filesystem.protocol:
        return None
    root = root.rstrip("/")
    return Place(lambda name: filesystem.cat_file(f"{root}/{name}"), lambda name, to: filesystem.get_file(f"{root}/{name}", to))


def _on_the_hub(address: str) -> Place:
    from huggingface_hub import HfApi, hf_hub_download

    where, _, revision = address.partition("@")
    try:
        name = hub_errors.repository(where)
        # Once: main may move between two files.
        commit = HfApi().model_info(name, revision=revision or None).sha
    except Exception as error:  # as in _place
        raise _unread(address, error) from error

    def local(file: str) -> str:
        return str(hf_hub_download(name, file, revision=commit))

    return Place(lambda file: Path(local(file)).read_bytes(), lambda file, to: shutil.copy(local(file), to))


def _contents(place: Place, address: str | Path) -> bytes:
    try:
        return place.read(CONTENTS)
    except FileNotFoundError:
        raise ExportError(f"{address}: no {CONTENTS}, so no artifact lies there, or not a whole one") from None
    except Exception as error:  # as in _place
        raise _unread(address, error) from error


def _fetch(place: Place, content: bytes, folder: Path, address: str) -> None:
    """Into `folder`; artifact.json last, so that what was cut off is fetched again."""
    contents = Contents.model_validate_json(content)
    for stored in tqdm(contents.files, desc="fetching the artifact", unit=" files", delay=2):
        path = folder / stored.file
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ExportError(f"{address}: its {CONTENTS} names {stored.file}, outside of the artifact; do not use it")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            place.get(stored.file, str(path))
        except Exception as error:  # as in _place
            raise _unread(f"{address}/{stored.file}", error) from error
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != stored.sha256:
                raise ExportError(f"{address}/{stored.file}: not what {CONTENTS} says; publish the artifact again")
    (folder / CONTENTS).write_bytes(content)


def _unread(address: str | Path, error: Exception) -> ExportError:
    # Signed addresses end in what nobody else may know.
    told = re.sub(r"\?\S+", "?...", " ".join(str(error).split()))[:200]
    return ExportError(f"{address}: cannot be read: {type(error).__name__}: {told}")
