"""Values of stages as Flyte's values, and the reverse: files, folders, tables and failures; all others are
the same."""

import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from flytekit import Artifact
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error.error import FlyteError
from flytekit.types.file import FlyteFile
from flytekit.types.structured import StructuredDataset
from pydantic import BaseModel

from flytune.schema import Strict
from flytune.stages import attempts, value_types
from flytune.stages.orchestrator import Failed, File, Folder, Listed, Stored, StoredRows

ARTIFACT = Artifact(name="flytune", partition_keys=["recipe", "base_model", "data"])
"""Artifact as Union's catalogue lists it; open-source Flyte only stores the same as metadata of the
output."""


class Facts:
    """Metadata of a task's output, which the console shows without opening the artifact."""

    def __init__(self, listed: Listed) -> None:
        self._facts = listed.facts

    def serialize_to_string(self, context: Any, variable: str) -> tuple[str, str]:
        """Return the metadata's key and value, as flytekit's protocol for an output's metadata requires."""
        return "flytune", json.dumps(self._facts)


class _Kind(NamedTuple):
    """Conversion of one type of stages."""

    flyte: Any
    """Flyte's type."""
    to_stage: Callable[[Any], Any]
    to_flyte: Callable[[Any], Any]


def _stored(kind: type[Stored]) -> Callable[[Any], Stored]:
    return lambda value: kind(str(value.remote_source or value.path), Path(value.path))


def _table(value: StructuredDataset) -> StoredRows:
    if (literal := value.literal) is None:
        return StoredRows(str(value.uri), Path(), value.file_format or "parquet")
    return StoredRows(str(literal.uri), Path(), literal.metadata.structured_dataset_type.format or "parquet")


def _failed(value: FlyteError | None) -> Failed:
    if value is None:
        return attempts.failed("")
    # On a cluster, Flyte names the node of the task that reports: fn0.
    return attempts.failed(
        value.message, "" if value.failed_node_id.startswith("fn") else value.failed_node_id
    )


def _listed(value: Listed) -> Any:
    return ARTIFACT.create_from(FlyteDirectory(value.address), Facts(value), **value.partitions)


_KINDS: dict[Any, _Kind] = {
    Folder: _Kind(FlyteDirectory, _stored(Folder), lambda value: FlyteDirectory(value.address)),
    File: _Kind(FlyteFile, _stored(File), lambda value: FlyteFile(value.address)),
    StoredRows: _Kind(StructuredDataset, _table, lambda value: value),
    Failed: _Kind(FlyteError | None, _failed, lambda value: value),
    Listed: _Kind(Annotated[FlyteDirectory, ARTIFACT], _stored(Listed), _listed),
}
_STORED: dict[Any, Callable[[str], Any]] = {
    Folder: lambda address: FlyteDirectory(address, remote_directory=False),
    File: lambda address: FlyteFile(address, remote_path=False),
}
_TYPES = {kind: made.flyte for kind, made in _KINDS.items()}


def flyte_type(kind: Any) -> Any:
    """Return the type that Flyte has in the place of a stage's."""
    return value_types.replaced(kind, _TYPES)


def to_stage(value: Any, kind: Any) -> Any:
    """Return a value of Flyte as stages have it."""
    return value_types.converted(value, kind, _KINDS, lambda one, into: _KINDS[into].to_stage(one))


def to_flyte(value: Any, kind: Any) -> Any:
    """Return a value of a stage as Flyte has it; files and folders of this machine are stored by Flyte."""
    return value_types.converted(value, kind, _KINDS, lambda one, into: _KINDS[into].to_flyte(one))


def constant(value: Any, kind: Any) -> Any:
    """Return a value of a sweep's state as Flyte has it: an address of a file or folder is not copied."""
    if isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, dict):
        return typing.cast(type[Strict], kind).model_validate(value)
    return value_types.converted(value, kind, _KINDS, lambda one, into: _STORED[into](one))


def output_type(kind: Any, has_separate_fields: bool) -> Any:
    """Return Flyte's type of a stage's result; a named tuple has an output for each field, or for each of its
    record's."""
    if not hasattr(kind, "_fields"):
        return flyte_type(kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [(name, flyte_type(hint)) for name, hint in hints.items()]
    if has_separate_fields:
        fields = [field for name, hint in hints.items() for field in _separate(name, hint)]
    return named_tuple(kind.__name__, fields)


def named_tuple(name: str, fields: list[tuple[str, Any]]) -> Any:
    """Return the type of several outputs."""
    return NamedTuple(name, fields)


def _separate(name: str, hint: Any) -> list[tuple[str, Any]]:
    if not (isinstance(hint, type) and issubclass(hint, BaseModel)):
        return [(name, flyte_type(hint))]
    return [(field, flyte_type(info.rebuild_annotation())) for field, info in hint.model_fields.items()]


def output(value: Any, kind: Any, flyte_kind: Any) -> Any:
    """Return a stage's result as the value of `output_type`."""
    if not hasattr(kind, "_fields"):
        return to_flyte(value, kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    found: dict[str, Any] = {}
    for name, hint in hints.items():
        one = getattr(value, name)
        found |= {name: to_flyte(one, hint)} if name in flyte_kind._fields else dict(one)
    return flyte_kind(**found)
