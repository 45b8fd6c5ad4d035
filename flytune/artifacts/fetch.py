"""Download of published artifacts to this machine, verified by their hashes; a local folder is used as it is."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from flytune import addresses, caches
from flytune.addresses import reason
from flytune.artifacts.publish import hub_errors
from flytune.errors import ExportError
from flytune.files import sha256_of
from flytune.names import inside
from flytune.records.contents import CONTENTS, read_contents
from flytune.storage import Storage


class Reader(NamedTuple):
    """Access to the files of one stored artifact, by their names."""

    read: Callable[[str], bytes]
    """Function that returns the content of a small file; FileNotFoundError if it does not exist."""
    get: Callable[[str, str], Any]
    """Function that downloads a file to a local path."""


def local_folder(address: str | Path) -> Path:
    """Return a local folder with the complete artifact; `flytune.artifacts.opening` verifies it before it is used.

    `address` is a folder, an fsspec address, or hf://owner/name@REVISION; without a revision, the head of main. Downloads are
    kept next to the hub's cache, which belongs to the user.

    Raises:
        ExportError: there is no complete artifact, it cannot be read, or a file differs from its artifact.json.
    """
    from filelock import FileLock

    addresses.check(address, "the artifact's address", ExportError)
    if (reader := _reader(address)) is None:
        return Path(str(address).removeprefix("file://"))
    content = _contents(reader, address)
    folder = caches.hub_folder("artifacts") / hashlib.sha256(content).hexdigest()[:16]
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / CONTENTS).exists():
            _fetch(reader, content, folder, str(address))
    return folder


def fetch(address: str, out: Path, reader: Reader | None = None) -> None:
    """Download all files of the artifact at `address` into the new folder `out`, by `reader` if one is given.

    Raises:
        ExportError: `out` is not empty; or as `local_folder`.
    """
    addresses.check(address, "the artifact's address", ExportError)
    if out.exists() and any(out.iterdir()):
        raise ExportError(f"{out}: not empty; give a new folder")
    if (reader := reader or _reader(address)) is None:
        raise ExportError(f"{address}: a folder of this machine already")
    _fetch(reader, _contents(reader, address), out, address)


def _reader(address: str | Path) -> Reader | None:
    """Return access to an artifact; None for a local folder."""
    if str(address).startswith(hub_errors.SCHEME):
        return _hub_reader(str(address))
    storage = Storage(address, key="", error=ExportError, failed="cannot be read", retry=False)
    if storage.is_local:
        return None
    return Reader(storage.read, lambda name, to: storage.download(name, Path(to)))


def _hub_reader(address: str) -> Reader:
    from huggingface_hub import HfApi, hf_hub_download

    where, _, revision = address.partition("@")
    try:
        name = hub_errors.repository(where)
        # Once: main may move between two files.
        commit = HfApi().model_info(name, revision=revision or None).sha
    except Exception as error:
        raise _unreadable(address, error) from error

    def download(file: str) -> str:
        return str(hf_hub_download(name, file, revision=commit))

    return Reader(lambda file: Path(download(file)).read_bytes(), lambda file, to: shutil.copy(download(file), to))


def _contents(reader: Reader, address: str | Path) -> bytes:
    try:
        return reader.read(CONTENTS)
    except FileNotFoundError:
        raise ExportError(f"{address}: no {CONTENTS}: there is no artifact, or an incomplete one") from None
    except Exception as error:
        raise _unreadable(address, error) from error


def _fetch(reader: Reader, content: bytes, folder: Path, address: str) -> None:
    """Download into `folder`; artifact.json is written last, so that an interrupted download is repeated."""
    contents = read_contents(content, f"{address}/{CONTENTS}")
    for stored in tqdm(contents.files, desc="fetching the artifact", unit=" files", delay=2):
        path = inside(folder, stored.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            reader.get(stored.file, str(path))
        except Exception as error:
            raise _unreadable(f"{address}/{stored.file}", error) from error
        if sha256_of(path) != stored.sha256:
            raise ExportError(f"{address}/{stored.file}: not what {CONTENTS} says; publish the artifact again")
    (folder / CONTENTS).write_bytes(content)


def _unreadable(address: str | Path, error: Exception) -> ExportError:
    """Return the error of a storage as it is; those of huggingface_hub, requests and FileNotFoundError as an ExportError."""
    return error if isinstance(error, ExportError) else ExportError(f"{address}: cannot be read: {reason(error)}")
