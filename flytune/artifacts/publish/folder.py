"""Publishing to a folder or an fsspec address: a copy of the artifact's folder, under the run's own name."""

import logging
from pathlib import Path

from tqdm import tqdm

from flytune.errors import ExportError
from flytune.files import is_temporary
from flytune.records import Contents
from flytune.records.contents import CONTENTS
from flytune.storage import Storage

log = logging.getLogger(__name__)


def publish(artifact: Path, contents: Contents, address: str, name: str, weights: Storage | None = None) -> str:
    """Copy an artifact to `address`/`name` and return that address; artifact.json comes last. Nothing is overwritten.

    Files that the folder `artifact` lacks are copied from the storage `weights`.

    Raises:
        ExportError: another artifact or other files are there, or the address cannot be written to.
    """
    target = f"{address.rstrip('/')}/{name}"
    storage = Storage(address, "publish.address", error=ExportError, failed="cannot be written to", retry=False)
    present = [file for file in storage.files(name) if not is_temporary(file)]
    if CONTENTS in present:
        if storage.read(f"{name}/{CONTENTS}") != (artifact / CONTENTS).read_bytes():
            raise _taken(target, "another artifact")
        log.info("%s: already published", target)
        return target
    wanted = {stored.file: stored.sha256 for stored in contents.files}
    for file in sorted(present):
        if storage.get(f"{name}/{file}") != wanted.get(file):
            raise _taken(target, f"{file}, which is not this artifact's")
    missing = [file for file in wanted if file not in present]
    if weights is not None:
        elsewhere = [file for file in missing if not (artifact / file).is_file()]
        storage.copy_from(weights, {f"{name}/{file}": file for file in elsewhere}, "publishing the weights")
        missing = [file for file in missing if file not in elsewhere]
    for file in tqdm([*missing, CONTENTS], desc="publishing", unit=" files", delay=2):
        storage.copy(artifact / file, f"{name}/{file}")
    return target


def _taken(target: str, found: str) -> ExportError:
    return ExportError(f"{target}: holds {found}; nothing is overwritten: remove it, or change the recipe's name or address")
