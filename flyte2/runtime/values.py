"""Values of stages as Flyte 2's values, and the reverse: files, folders, tables and failures; all others are
the same."""

import hashlib
import tempfile
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from flyte.io import DataFrame, Dir, File

from flytune.stages import attempts, value_types
from flytune.stages import orchestrator as stages
from flytune.stages.orchestrator import Orchestrator, Stored


class _Kind(NamedTuple):
    """Conversion of one type of stages."""

    flyte: Any
    """Flyte's type."""
    to_stage: Callable[[Any], Any]
    make: Callable[[str], Any]
    """Value of Flyte for an address."""


def _stored(kind: type[Stored]) -> Callable[[Any], Stored]:
    return lambda value: at(kind, value.path)


def at(kind: type[Stored], address: str) -> Stored:
    """Return a stored file or folder by its address; its copy on this node has one path for all processes."""
    if "://" not in address:
        return kind.here(Path(address))
    place = hashlib.sha256(address.encode()).hexdigest()[:16]
    return kind(
        address, Path(tempfile.gettempdir(), "flytune-fetched", place, address.rstrip("/").rpartition("/")[2])
    )


_FOLDER = _Kind(Dir, _stored(stages.Folder), lambda address: Dir(path=address))
_KINDS: dict[Any, _Kind] = {
    stages.Folder: _FOLDER,
    stages.Listed: _FOLDER,
    stages.File: _Kind(File, _stored(stages.File), lambda address: File(path=address)),
    stages.StoredRows: _Kind(
        DataFrame,
        lambda value: stages.StoredRows(str(value.uri), Path(), value.format or "parquet"),
        lambda address: DataFrame(uri=address),
    ),
    # The message of Flyte's error; the failed stage has its name in it.
    stages.Failed: _Kind(str, attempts.failed, lambda address: address),
}
_TYPES = {kind: made.flyte for kind, made in _KINDS.items()}


def flyte_type(kind: Any) -> Any:
    """Return the type that Flyte has in the place of a stage's."""
    if hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind, include_extras=True)
        return NamedTuple(kind.__name__, [(name, flyte_type(hint)) for name, hint in hints.items()])
    return value_types.replaced(kind, _TYPES)


def to_stage(value: Any, kind: Any) -> Any:
    """Return a value of Flyte as stages have it."""
    return value_types.converted(value, kind, _KINDS, lambda one, into: _KINDS[into].to_stage(one))


def to_flyte(orchestrator: Orchestrator, value: Any, kind: Any) -> Any:
    """Return a value of a stage as Flyte has it; files and folders of a pod are stored."""

    def stored(one: Any, into: Any) -> Any:
        if isinstance(one, Stored) and one.is_here and not orchestrator.is_local():
            # A file keeps its name.
            name = f"/{one.path.name}" if one.path.is_file() else ""
            return _KINDS[into].make(orchestrator.store(one.path, orchestrator.new_address() + name))
        return _KINDS[into].make(one.address)

    if hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind, include_extras=True)
        return tuple(
            value_types.converted(getattr(value, name), hint, _KINDS, stored) for name, hint in hints.items()
        )
    return value_types.converted(value, kind, _KINDS, stored)
