"""artifact.json, the list of an artifact's files, and functions that list files and read records."""

import hashlib
import re
from collections.abc import Callable, Mapping
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import Field, model_validator
from tqdm import tqdm

from flytune import json_core
from flytune.addresses import reason
from flytune.errors import ExportError
from flytune.files import CHUNK, read_regular, sha256_of
from flytune.names import FileName, NameRefused, check_list, inside
from flytune.schema import Record, RecordError, Strict, omitted

_Kind = TypeVar("_Kind", bound=Record)

CONTENTS = "artifact.json"
SWEEP = "sweep.json"
"""File of a sweep's folder with all of its points."""
Kind = Literal["artifact", "sweep", "answers", "dataset"]
"""Kinds of folders that list their files: an artifact, and what other workflows than finetune end with."""


class StoredFile(Strict):
    """A stored file with its size and hash."""

    file: FileName
    """Path relative to the record that lists it, with slashes."""
    size: Annotated[int, Field(ge=0)]
    """Size in bytes."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class FileDiffers(ValueError):
    """A file that is not the one that its list has."""


class Contents(Record):
    """artifact.json, written last: an artifact, or another folder that a workflow ends with, is incomplete
    without one."""

    kind: Kind = omitted("artifact")
    files: list[StoredFile]
    identity: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = omitted("")
    """Hash of the model and of what made it (flytune.artifacts.identity), the same for equal runs; empty
    before 0.2.0."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        check_list(file.file for file in self.files)
        return self

    def check(self, name: str, size: int, sha256: str) -> None:
        """Compare a file that was read with the one that was written.

        Raises:
            FileDiffers: the name is not listed, or size or hash differ.
        """
        listed = next((file for file in self.files if file.file == name), None)
        if listed is None:
            raise FileDiffers(f"{name}: not one of the artifact's files, by {CONTENTS}")
        if size != listed.size:
            raise FileDiffers(f"{name}: has {size:,} bytes, {listed.size:,} by {CONTENTS}")
        if sha256 != listed.sha256:
            raise FileDiffers(f"{name}: its content is not what was written, by {CONTENTS}")


def record(kind: type[_Kind], path: Path) -> _Kind:
    """Read a record.

    Raises:
        ExportError: the file is missing, or is no such record.
    """
    try:
        return kind.read(path)
    except FileNotFoundError:
        raise ExportError(f"{path}: missing, so its folder is incomplete; nothing was stored") from None
    except RecordError as error:
        raise ExportError(f"{path}: not a {kind.__name__} ({error}); nothing was stored") from None


def read_contents(content: str | bytes, where: object) -> Contents:
    """Return the content of an artifact.json that comes from outside.

    Raises:
        ExportError: it is empty, of another kind (a page of HTML, another record), or names files outside of
            the artifact.
    """
    try:
        return Contents.parse(content)
    except RecordError as error:
        raise ExportError(f"{where}: not an artifact's {CONTENTS} ({error}); do not use it") from None


def kind_of(content: bytes) -> str:
    """Return the kind of folder whose artifact.json this is; of a damaged one, `artifact`."""
    try:
        return str(json_core.load_object(content).get("kind", "artifact"))
    except json_core.JSONError:
        return "artifact"


def refuse_other(kind: str, where: object) -> None:
    """Refuse a listed folder that is not an artifact.

    Raises:
        ExportError: the kind is another.
    """
    if kind != "artifact":
        todo = "; `flytune fetch --point` fetches the artifact of a point" * (kind == "sweep")
        raise ExportError(f"{where}: the folder of {_KINDS.get(kind, kind)}, and no artifact{todo}")


def without_weights(contents: Contents) -> Contents:
    """Return the list of all files but the weights, which are the safetensors of the folder itself."""
    small = [file for file in contents.files if not re.fullmatch(r"[^/]+\.safetensors", file.file)]
    return contents.model_copy(update={"files": small})


def verify(
    folder: Path, listed: Contents | None = None, elsewhere: bool = False, weights: bool = True
) -> Contents:
    """Compare every file of an artifact on this machine with its size and hash in artifact.json, and return
    that list.

    Args:
        folder: the artifact. Files that are not listed may be there, unless a library would load them by
            their names.
        listed: the list, where it is not artifact.json.
        elsewhere: whether files may be missing, because they are in another storage.
        weights: whether the weights are compared, which may be missing otherwise.

    Raises:
        ExportError: artifact.json is missing, damaged, or that of no artifact; a file is missing, differs, is
            a link that leads out of the folder, or is one that a library would load and artifact.json does
            not list.
    """
    if listed is None:
        try:
            listed = read_contents(read_regular(folder / CONTENTS, json_core.LARGEST), folder / CONTENTS)
        except (FileNotFoundError, NotADirectoryError):
            raise ExportError(
                f"{folder}: no {CONTENTS}: there is no artifact, or an incomplete one"
            ) from None
        except OSError as error:
            raise ExportError(f"{folder / CONTENTS}: cannot be read: {reason(error)}") from None
    refuse_other(listed.kind, folder)
    known = {CONTENTS, *(file.file for file in listed.files)}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in name.parts)
        if path.suffix in LOADED and not is_hidden and name.as_posix() not in known and not path.is_dir():
            raise ExportError(
                f"{folder}: {name.as_posix()!r:.200}: not one of the artifact's files, by {CONTENTS}; "
                f"{_AGAIN}"
            )
        problem = _link_problem(folder, name.as_posix()) if path.is_symlink() and not is_hidden else None
        if problem:
            raise ExportError(f"{folder}: {problem}; {_AGAIN}")
    compared = (listed if weights else without_weights(listed)).files
    total = sum(file.size for file in compared)
    with (
        tqdm(total=total, desc=f"verifying {folder.name}", unit="B", unit_scale=True, delay=2) as bar,
        ThreadPool(4) as pool,
    ):
        for problem in pool.imap(lambda file: _problem(folder, file, elsewhere, bar.update), compared):
            if problem:
                raise ExportError(f"{folder}: {problem}; {_AGAIN}")
    return listed


def seal(folder: Path, kind: Kind, hashes: Mapping[str, str] | None = None) -> None:
    """List the files of a complete folder in its artifact.json, by which a download of it is verified.

    Args:
        folder: the folder, without an artifact.json.
        kind: its kind.
        hashes: known hashes by relative path; these files are not read.
    """
    Contents(kind=kind, files=list_files(folder, hashes)).write(folder / CONTENTS)


_KINDS = {"sweep": "a sweep", "answers": "answers", "dataset": "a data set"}
LOADED = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".pickle",
    ".joblib",
    ".h5",
    ".msgpack",
    ".py",
    ".so",
}
LOADED |= {".json", ".yaml", ".jinja", ".model", ".tiktoken", ".txt"}
"""Suffixes of files that libraries look for by their names."""
_AGAIN = "the artifact is incomplete or was changed: fetch it again, or restore it"


def _link_problem(folder: Path, name: str) -> str | None:
    """Return that a link leads out of the folder; libraries look into some folders, which such a link can
    name."""
    try:
        inside(folder, name)
    except NameRefused as error:
        return str(error)
    return None


def _problem(folder: Path, file: StoredFile, elsewhere: bool, update: Callable[[int], Any]) -> str | None:
    """Return why a file is not what was written; None if it is."""
    digest = hashlib.sha256()
    try:
        path = inside(folder, file.file)
        if not path.is_file():
            return None if elsewhere else f"{file.file}: listed in {CONTENTS} but missing"
        if (size := path.stat().st_size) != file.size:
            return f"{file.file}: has {size:,} bytes, {file.size:,} by {CONTENTS}"
        with path.open("rb") as content:
            while chunk := content.read(CHUNK):
                digest.update(chunk)
                update(len(chunk))
    except NameRefused as error:
        return str(error)
    except OSError as error:
        return f"{file.file}: cannot be read: {reason(error)}"
    return (
        None
        if digest.hexdigest() == file.sha256
        else f"{file.file}: its content is not what was written, by {CONTENTS}"
    )


def stored_file(path: Path, name: str, sha256: str | None = None) -> StoredFile:
    """Return the size and hash of a file, listed as `name`; a file whose hash is given is not read."""
    return StoredFile(file=name, size=path.stat().st_size, sha256=sha256 or sha256_of(path))


def list_files(
    folder: Path, hashes: Mapping[str, str] | None = None, label: str = "hashing"
) -> list[StoredFile]:
    """List every file below `folder` with size and hash, sorted by path.

    Args:
        folder: all its subfolders are listed too.
        hashes: known hashes by relative path; these files are not read.
        label: name of the progress bar.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    bar = tqdm(zip(paths, names, strict=True), total=len(paths), desc=label, unit=" files", delay=2)
    return [stored_file(path, name, (hashes or {}).get(name)) for path, name in bar]


class Reader(NamedTuple):
    """Access to the files of one stored artifact, by their names."""

    read: Callable[[str], bytes]
    """Function that returns the content of a small file; FileNotFoundError if it does not exist."""
    get: Callable[[str, str], Any]
    """Function that downloads a file to a local path."""


def has_list(reader: Reader, address: str) -> bool:
    """Return whether a folder has the list by which its files are verified.

    Raises:
        ExportError: it cannot be read.
    """
    try:
        reader.read(CONTENTS)
    except FileNotFoundError:
        return False
    except ExportError:
        raise
    except Exception as error:
        raise unreadable(address, error) from error
    return True


def unreadable(address: str | Path, error: Exception) -> ExportError:
    """Return an error of huggingface_hub or requests, or a FileNotFoundError, as an ExportError."""
    return ExportError(f"{address}: cannot be read: {reason(error)}")
