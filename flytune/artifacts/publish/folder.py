"""Publishing to a folder or an fsspec address: the artifact's folder as it is, below a name of its own."""

import hashlib
import logging
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flytune.errors import ExportError
from flytune.records.contents import CONTENTS, Contents

log = logging.getLogger(__name__)

_PART = ".part"


def publish(artifact: Path, contents: Contents, address: str, name: str) -> str:
    """Copies an artifact to `address`/`name`, and returns that; artifact.json comes last. Nothing is ever overwritten.

    Raises:
        ExportError: something else is there, or the address cannot be written to.
    """
    target = f"{address.rstrip('/')}/{name}"
    try:
        _publish(artifact, contents, target)
    except ExportError:
        raise
    except Exception as error:  # Each file system has errors of its own; botocore's are not even OSErrors.
        reason = " ".join(str(error).split())[:300]
        raise ExportError(f"publish.address: {address}: cannot be written to: {type(error).__name__}: {reason}") from error
    return target


def _publish(artifact: Path, contents: Contents, target: str) -> None:
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(target)
    filesystem.invalidate_cache()
    present = {found.removeprefix(root).strip("/") for found in filesystem.find(root) if not found.endswith(_PART)}
    if CONTENTS in present:
        if filesystem.cat_file(f"{root}/{CONTENTS}") != (artifact / CONTENTS).read_bytes():
            raise _taken(target, "another artifact")
        log.info("%s: already published", target)
        return
    wanted = {stored.file: stored.sha256 for stored in contents.files}
    for file in sorted(present):
        if _remote_sha256(filesystem, f"{root}/{file}") != wanted.get(file):
            raise _taken(target, f"{file}, which is not this artifact's")
    missing = [file for file in wanted if file not in present]
    for file in tqdm([*missing, CONTENTS], desc="publishing", unit=" files", delay=2):
        filesystem.makedirs(f"{root}/{file}".rpartition("/")[0], exist_ok=True)
        _put(filesystem, artifact / file, f"{root}/{file}")


def _put(filesystem: Any, file: Path, path: str) -> None:
    """A file is there whole or not at all: object stores see to that themselves, a folder by the last step's rename."""
    if "file" in filesystem.protocol:
        filesystem.put_file(str(file), path + _PART)
        filesystem.mv(path + _PART, path)
    else:
        filesystem.put_file(str(file), path)


def _taken(target: str, found: str) -> ExportError:
    return ExportError(f"{target}: holds {found}; nothing is overwritten: remove it, or change the recipe's name or address")


def _remote_sha256(filesystem: Any, path: str) -> str:
    digest = hashlib.sha256()
    with filesystem.open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()
