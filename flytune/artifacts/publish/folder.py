"""Publishing to a folder or an fsspec address: a copy of the artifact's folder, under the run's own name."""

import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from tqdm import tqdm

from flytune.artifacts import identity
from flytune.errors import ExportError
from flytune.files import is_temporary
from flytune.records import Contents
from flytune.records.contents import CONTENTS
from flytune.schema import RecordError
from flytune.storage import Storage

log = logging.getLogger(__name__)

PARTIAL = "artifact.partial.json"
"""File of a publication that is not complete: its artifact.json to be. An equal run completes it."""


def check(address: str) -> None:
    """Check before training that an artifact can be written below an address: a small file is written there
    and deleted.

    Nothing is made on this machine: its folder is looked at.

    Raises:
        ExportError: it cannot be written.
    """
    storage = Storage(
        address, "publish.address", error=ExportError, failed="cannot be written to", retry=False
    )
    if not storage.is_local:
        name = f".flytune-{uuid.uuid4().hex}"
        storage.write(name, b"")
        storage.remove(name)
        return
    above = next(
        path for path in (Path(storage.path()), *Path(storage.path()).parents) if os.path.lexists(path)
    )
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        reason = "is not a folder" if not above.is_dir() else "cannot be written"
        raise ExportError(f"{storage.where}: cannot be written to: {above} {reason}; give another address")


def publish(
    artifact: Path,
    contents: Contents,
    address: str,
    name: str,
    weights: Storage | None,
    beside: Mapping[str, bytes],
) -> str:
    """Copy an artifact to `address`/`name` and return that address; artifact.json comes last. Nothing is
    overwritten.

    Files that the folder `artifact` lacks are copied from the storage `weights`. The artifact of an equal run
    is left as it is, and so is a file of its own that has the name of one `beside` the artifact. Where
    publishing fails, a folder of this machine is as before; an address keeps what was uploaded, without
    artifact.json.

    Raises:
        ExportError: another artifact or other files are there, or the address cannot be written to.
    """
    target = f"{address.rstrip('/')}/{name}"
    storage = Storage(
        address, "publish.address", error=ExportError, failed="cannot be written to", retry=False
    )
    try:
        _publish(artifact, contents, storage, target, name, weights)
    except (ExportError, FileNotFoundError):
        if not _is_there(artifact, contents, storage, name):
            raise
        log.info("%s: published by an equal run at the same time", target)
    for file, content in beside.items():
        storage.create(f"{name}/{file}", content)
    return target


def _is_there(artifact: Path, contents: Contents, storage: Storage, name: str) -> bool:
    """Return whether an equal run has published all files."""
    try:
        if not _is_equal(storage.read(f"{name}/{CONTENTS}"), artifact, contents):
            return False
        _check_sizes(storage, name, contents)
    except (ExportError, FileNotFoundError):
        return False
    return True


def _publish(
    artifact: Path, contents: Contents, storage: Storage, target: str, name: str, weights: Storage | None
) -> None:
    present = [file for file in storage.files(name) if not is_temporary(file)]
    if CONTENTS in present:
        if not _is_equal(storage.read(f"{name}/{CONTENTS}"), artifact, contents):
            raise _taken(target, "another artifact")
        log.info("%s: already published", target)
        return
    completes = PARTIAL in present and _is_equal(storage.read(f"{name}/{PARTIAL}"), artifact, contents)
    wanted, old = {stored.file: stored.sha256 for stored in contents.files}, [PARTIAL] if completes else []
    for file in sorted({*present} - {*old}):
        if storage.get(f"{name}/{file}") == wanted.get(file):
            continue
        if not (completes and identity.is_record(file)):
            raise _taken(target, f"{file}, which is not this artifact's")
        old.append(file)
    missing = [file for file in wanted if file not in present or file in old]
    try:
        storage.write(f"{name}/{PARTIAL}", (artifact / CONTENTS).read_bytes())
        _copy(artifact, storage, name, missing, weights)
        for file in {*old} - {*wanted, PARTIAL}:
            storage.remove(f"{name}/{file}")
        _check_sizes(storage, name, contents)
        storage.copy(artifact / CONTENTS, f"{name}/{CONTENTS}")
        # After artifact.json, so that an equal run at the same time always finds one of the two.
        storage.remove(f"{name}/{PARTIAL}")
    except ExportError as error:
        if not storage.is_local:
            raise ExportError(f"{error}; what was uploaded stays there, and is not sent again") from error
        if not _is_there(artifact, contents, storage, name):
            _remove(storage, name, {PARTIAL, *wanted} - {*present})
        raise


def _copy(artifact: Path, storage: Storage, name: str, files: list[str], weights: Storage | None) -> None:
    elsewhere = [file for file in files if weights is not None and not (artifact / file).is_file()]
    if weights is not None:
        storage.copy_from(weights, {f"{name}/{file}": file for file in elsewhere}, "publishing the weights")
    for file in tqdm(
        [file for file in files if file not in elsewhere], desc="publishing", unit=" files", delay=2
    ):
        storage.copy(artifact / file, f"{name}/{file}")


def _check_sizes(storage: Storage, name: str, contents: Contents) -> None:
    """Compare the sizes of all files there: a storage may accept a file, and keep a part of it."""
    sizes = storage.sizes(name)
    for file in contents.files:
        if (size := sizes.get(file.file)) != file.size:
            difference = "is missing" if size is None else f"has {size:,} bytes"
            raise ExportError(
                f"{storage.where}: {name}/{file.file} {difference} there, {file.size:,} were written; "
                "run it again"
            )


def _remove(storage: Storage, name: str, files: set[str]) -> None:
    """Remove files that were published, and the folder if nothing else is in it."""
    try:
        for file in files:
            storage.remove(f"{name}/{file}")
        if not storage.files(name):
            storage.remove(name)
    except ExportError as error:
        log.warning("%s: a part of the artifact is left there: %s", name, error)


def _is_equal(content: bytes, artifact: Path, contents: Contents) -> bool:
    """Return whether an artifact.json is the artifact's, or of an equal run: the same identity, and files of
    the model."""
    if content == (artifact / CONTENTS).read_bytes():
        return True
    try:
        stored = Contents.parse(content)
    except RecordError:
        return False
    models = [
        [file for file in listing.files if not identity.is_record(file.file)]
        for listing in (stored, contents)
    ]
    return bool(contents.identity) and stored.identity == contents.identity and models[0] == models[1]


def _taken(target: str, content: str) -> ExportError:
    return ExportError(
        f"{target}: holds {content}; nothing is overwritten: remove it, or change the recipe's name or "
        "address"
    )
