"""Download of artifacts and other listed folders to this machine, verified by hashes; a local folder is used
as it is."""

import hashlib
import shutil
from pathlib import Path

from tqdm import tqdm

from flytune import addresses, caches, json_core
from flytune.addresses import reason
from flytune.artifacts.publish import hub_errors
from flytune.errors import ExportError
from flytune.files import full_error, new_output, read_regular, sha256_of
from flytune.names import inside
from flytune.records import Contents
from flytune.records.contents import (
    CONTENTS,
    SWEEP,
    FileDiffers,
    Reader,
    kind_of,
    read_contents,
    refuse_other,
    unreadable,
    without_weights,
)
from flytune.storage import Storage


def local_folder(address: str | Path, weights: bool = True) -> Path:
    """Return a local folder with the complete artifact; `flytune.artifacts.opening` verifies it before it is
    used.

    Downloads are kept next to the hub's cache, which belongs to the user.

    Args:
        address: a folder, an fsspec address, or hf://owner/name@REVISION; without a revision, the head of
            main.
        weights: whether the weights are needed; without them a download is small.

    Raises:
        ExportError: there is no complete artifact, it cannot be read, or a file differs from its
            artifact.json.
    """
    from filelock import FileLock

    addresses.check(address, "the artifact's address", ExportError)
    if (reader := _reader(address)) is None:
        local = Path(str(address).removeprefix("file://"))
        if (local / CONTENTS).is_file():
            refuse_other(kind_of(read_regular(local / CONTENTS, json_core.LARGEST)), address)
        return local
    content = _contents(reader, address)
    refuse_other(kind_of(content), address)
    name = hashlib.sha256(content).hexdigest()[:16]
    folder = caches.hub_folder("artifacts") / (name if weights else f"{name}-records")
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / CONTENTS).exists():
            shutil.rmtree(folder, ignore_errors=True)
            _fetch(reader, content, folder, str(address), weights)
    return folder


def fetch(address: str, out: Path, reader: Reader | None = None) -> None:
    """Download all files of the artifact or other listed folder at `address` into the new folder `out`, by
    `reader` if given.

    The folder appears when it is complete.

    Raises:
        ExportError: `out` is not empty; or as `local_folder`.
        StorageError: the disk is full.
    """
    addresses.check(address, "the artifact's address", ExportError)
    if out.exists() and any(out.iterdir()):
        raise ExportError(f"{out}: not empty; give a new folder")
    if (reader := reader or _reader(address)) is None:
        is_here = Path(address.removeprefix("file://")).exists()
        raise ExportError(f"{address}: {'a folder of this machine already' if is_here else 'no such folder'}")
    _fetch(reader, _contents(reader, address), out, address)


def find_point(address: str, name: str, reader: Reader | None) -> str:
    """Return the address of the artifact of a point of the sweep whose folder is at `address`, which `reader`
    reads if given.

    Raises:
        ExportError: there is no sweep, it has no such point, or the point has failed.
    """
    addresses.check(address, "the sweep's address", ExportError)
    reader = reader or _reader(address, is_local=True)
    assert reader is not None
    try:
        content = reader.read(SWEEP)
    except FileNotFoundError:
        raise ExportError(
            f"{address}: no {SWEEP}, so it is no sweep's folder; leave out --point {name}"
        ) from None
    except ExportError:
        raise
    except Exception as error:
        raise unreadable(address, error) from error
    where = f"{address}/{SWEEP}"
    try:
        # Earlier versions list no files of a sweep; the artifact has its own list.
        listed = read_contents(reader.read(CONTENTS), f"{address}/{CONTENTS}")
        listed.check(SWEEP, len(content), hashlib.sha256(content).hexdigest())
    except FileNotFoundError:
        pass
    except FileDiffers as error:
        raise ExportError(f"{address}: {error}; run the sweep again") from None
    try:
        # By keys: earlier versions have other figures.
        points = {str(outcome["name"]): outcome for outcome in json_core.load_object(content)["outcomes"]}
        if name not in points:
            raise ExportError(f"{where}: no point {name:.80}; there are {', '.join(points)}")
        if not (stored := str(points[name]["artifact"])):
            raise ExportError(f"{where}: {name} has no artifact: {points[name]['reason']}")
    except (json_core.JSONError, KeyError, TypeError) as error:
        raise ExportError(
            f"{where}: not the record of a sweep ({reason(error)}); run the sweep again"
        ) from None
    return stored


def _reader(address: str | Path, is_local: bool = False) -> Reader | None:
    """Return access to an artifact; None for a local folder, if `is_local` is not set."""
    if str(address).startswith(hub_errors.SCHEME):
        return _hub_reader(str(address))
    storage = Storage(address, key="", error=ExportError, failed="cannot be read", retry=False)
    if storage.is_local and not is_local:
        return None
    return Reader(storage.read, lambda name, to: storage.download(name, Path(to)))


def _hub_reader(address: str) -> Reader:
    from huggingface_hub import HfApi, hf_hub_download

    where, _, revision = address.partition("@")
    try:
        name = hub_errors.repository(where, "")
        # Once: main may move between two files.
        commit = HfApi().model_info(name, revision=revision or None).sha
    except ExportError:
        raise
    except Exception as error:
        raise unreadable(address, error) from error

    def download(file: str) -> str:
        return str(hf_hub_download(name, file, revision=commit))

    return Reader(
        lambda file: Path(download(file)).read_bytes(), lambda file, to: shutil.copy(download(file), to)
    )


def _contents(reader: Reader, address: str | Path) -> bytes:
    try:
        return reader.read(CONTENTS)
    except FileNotFoundError:
        raise ExportError(f"{address}: no {CONTENTS}: there is no artifact, or an incomplete one") from None
    except ExportError:
        raise
    except Exception as error:
        raise unreadable(address, error) from error


def _fetch(reader: Reader, content: bytes, out: Path, address: str, weights: bool = True) -> None:
    """Download into the new folder `out`."""
    contents = read_contents(content, f"{address}/{CONTENTS}")
    if not weights:
        contents = without_weights(contents)
    with new_output(out) as folder:
        folder.mkdir()
        _download(reader, contents, folder, address)
        (folder / CONTENTS).write_bytes(content)


def _download(reader: Reader, contents: Contents, folder: Path, address: str) -> None:
    for stored in tqdm(contents.files, desc=f"fetching the {contents.kind}", unit=" files", delay=2):
        path = inside(folder, stored.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            reader.get(stored.file, str(path))
        except ExportError:
            raise
        except Exception as error:
            if full_error(error):
                raise
            raise unreadable(f"{address}/{stored.file}", error) from error
        if sha256_of(path) != stored.sha256:
            raise ExportError(
                f"{address}/{stored.file}: not what {CONTENTS} says; publish the artifact again"
            )
