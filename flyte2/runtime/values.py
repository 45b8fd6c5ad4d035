"""Values of stages as Flyte 2's values, and the reverse: files, folders, tables and failures; all others are
the same."""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flyte.io import DataFrame, Dir, File

from flyte2.runtime.orchestrator import current
from flytune.stages import attempts
from flytune.stages import orchestrator as stages
from flytune.stages.orchestrator import Stored
from flytune.stages.value_types import TypePair, ValueTypes


def _stored(kind: type[Stored]) -> Callable[[Any], Stored]:
    return lambda value: at(kind, value.path)


def at(kind: type[Stored], address: str) -> Stored:
    """Return a stored file or folder by its address; its copy on this node has one path for all processes."""
    if "://" not in address:
        return kind.here(Path(address))
    place = hashlib.sha256(address.encode()).hexdigest()[:16]
    name = address.rstrip("/").rpartition("/")[2]
    return kind(address, Path(tempfile.gettempdir(), "flytune-fetched", place, name))


def _address(value: Stored) -> str:
    """Return the address of a stage's file or folder; what is in a pod is stored."""
    orchestrator = current()
    if not value.is_here or orchestrator.is_local():
        return value.address
    # A file keeps its name.
    name = f"/{value.path.name}" if value.path.is_file() else ""
    return orchestrator.store(value.path, orchestrator.new_address() + name)


_FOLDER = TypePair(Dir, _stored(stages.Folder), lambda value: Dir(path=_address(value)))
TYPES = ValueTypes(
    {
        stages.Folder: _FOLDER,
        stages.Listed: _FOLDER,
        stages.File: TypePair(File, _stored(stages.File), lambda value: File(path=_address(value))),
        stages.StoredRows: TypePair(
            DataFrame,
            lambda value: stages.StoredRows(str(value.uri), Path(), value.format or "parquet"),
            lambda value: DataFrame(uri=value.address),
        ),
        # The message of Flyte's error; the failed stage has its name in it.
        stages.Failed: TypePair(str, attempts.failed, str),
    }
)
"""Types of stages in those of Flyte 2."""
