"""Values of stages as Flyte's values, and the reverse: files, folders, tables and failures; all others are
the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from flytekit import Artifact
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error.error import FlyteError
from flytekit.types.file import FlyteFile
from flytekit.types.structured import StructuredDataset

from flytune.schema import Strict
from flytune.stages import attempts
from flytune.stages.orchestrator import Failed, File, Folder, Listed, Stored, StoredRows
from flytune.stages.table import Stage
from flytune.stages.value_types import TypePair, ValueTypes, hints_of, named_tuple

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


TYPES = ValueTypes(
    {
        Folder: TypePair(FlyteDirectory, _stored(Folder), lambda value: FlyteDirectory(value.address)),
        File: TypePair(FlyteFile, _stored(File), lambda value: FlyteFile(value.address)),
        StoredRows: TypePair(StructuredDataset, _table, lambda value: value),
        Failed: TypePair(FlyteError | None, _failed, lambda value: value),
        Listed: TypePair(Annotated[FlyteDirectory, ARTIFACT], _stored(Listed), _listed),
    }
)
"""Types of stages in those of Flyte, which stores files and folders of this machine."""
_OF_ADDRESSES = ValueTypes(
    {
        Folder: TypePair(None, str, lambda address: FlyteDirectory(address, remote_directory=False)),
        File: TypePair(None, str, lambda address: FlyteFile(address, remote_path=False)),
    }
)


def constant(value: Any, kind: Any) -> Any:
    """Return a value of a sweep's state as Flyte has it: an address of a file or folder is not copied."""
    if _is_record(kind) and isinstance(value, dict):
        return kind.model_validate(value)
    return _OF_ADDRESSES.from_stage(value, kind)


def output_type(stage: Stage, kind: Any) -> Any:
    """Return Flyte's type of a stage's result; a named tuple has an output for each field, or for each of its
    record's."""
    if not stage.has_separate_fields:
        return TYPES.type_of(kind)
    fields = [field for name, hint in hints_of(kind).items() for field in _separate(name, hint)]
    return named_tuple(kind.__name__, fields)


def _separate(name: str, hint: Any) -> list[tuple[str, Any]]:
    if not _is_record(hint):
        return [(name, TYPES.type_of(hint))]
    return [(field, TYPES.type_of(info.rebuild_annotation())) for field, info in hint.model_fields.items()]


def output(stage: Stage, value: Any, kind: Any) -> Any:
    """Return a stage's result as a value of `output_type`."""
    if not stage.has_separate_fields:
        return TYPES.from_stage(value, kind)
    values: list[Any] = []
    for name, hint in hints_of(kind).items():
        field = getattr(value, name)
        values += dict(field).values() if _is_record(hint) else [TYPES.from_stage(field, hint)]
    return tuple(values)


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Strict)
