"""The results of an execution: found through flyteadmin, and read by addresses that flyteadmin signs.

No credentials for the cluster's storage are needed.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from flytune.cluster import control_plane
from flytune.cluster.control_plane import ControlPlane
from flytune.errors import ExportError
from flytune.records.contents import Reader, has_list
from flytune.sentences import counted

STORE = "tasks.store.store_artifact"
"""The task whose output is the artifact."""
SUCCEEDED = "SUCCEEDED"
FAILED = ("FAILED", "FAILING", "ABORTED", "ABORTING", "TIMED_OUT")
"""Phases of executions that do not succeed."""
_NAME = r"[a-z][a-z0-9-]*"
_ADDRESSES = (
    re.compile(
        r"https?://.*/projects/(?P<project>[^/]+)/domains/(?P<domain>[^/]+)/executions/(?P<name>[^/?#]+).*"
    ),
    re.compile(
        r"flyte://v1/(?P<project>[^/]+)/(?P<domain>[^/]+)/(?P<name>[^/]+)(?:/(?P<node>[^/]+)(?:/.*)?)?"
    ),
    re.compile(rf"(?P<name>{_NAME})"),
)


class Execution(NamedTuple):
    """An execution, or one node of it."""

    project: str
    domain: str
    name: str
    node: str | None = None

    @property
    def identifier(self) -> Any:
        """Identifier of the execution in flytekit's models."""
        return control_plane.identifier(self.project, self.domain, self.name)

    def __str__(self) -> str:
        return f"{self.name} in {self.project}-{self.domain}" + (f", node {self.node}" if self.node else "")


class ExecutionResult(NamedTuple):
    """A folder that an execution has stored, or the records that it has returned."""

    address: str = ""
    """Address of the folder; empty if there are records."""
    plane: ControlPlane | None = None
    """Control plane that gives access to the storage; None where this machine reads it by itself."""
    records: Mapping[str, Any] = MappingProxyType({})
    """Values of the returned records, by the names of the outputs."""

    def reader(self, address: str) -> Reader | None:
        """Return access to the folder at an address by the control plane; None without one."""
        return None if self.plane is None else reader(self.plane, address)


def parse(text: str, project: str, domain: str) -> Execution | None:
    """Return the execution of an id, an address of the console or a flyte:// address; None for any other
    address.

    `project` and `domain` apply to an id.
    """
    for pattern in _ADDRESSES:
        if match := pattern.fullmatch(text.strip()):
            return Execution(**({"project": project, "domain": domain} | match.groupdict()))
    return None


def reader(plane: ControlPlane, address: str) -> Reader:
    """Return access to the files of the folder at `address`."""

    def get(name: str, to: str) -> None:
        with plane.opened(f"{address}/{name}") as answer, open(to, "wb") as file:
            shutil.copyfileobj(answer.raw, file, 8 * 2**20)

    return Reader(lambda name: plane.content(f"{address}/{name}"), get)


def find(execution: Execution, is_listed: bool = True) -> ExecutionResult:
    """Return the results of an execution: the folder or the records that its workflow returns, or else the
    stored artifact.

    Args:
        execution: the execution.
        is_listed: whether the folder must have the list of its files, which one of an earlier version lacks.

    Raises:
        ExportError: flyteadmin does not know it, there is nothing that can be fetched and verified, or only
            artifacts of an execution that has not succeeded, which the error lists by their nodes.
    """
    with control_plane.connected(execution) as plane:
        phase, _ = plane.closure(execution.identifier)
        outputs = plane.outputs(execution.identifier, execution.node)
        folders = list(filter(None, map(_folder, outputs.values())))
        if execution.node and folders:
            return ExecutionResult(folders[0], plane)
        if len(folders) == 1 and (not is_listed or has_list(reader(plane, folders[0]), folders[0])):
            return ExecutionResult(folders[0], plane)
        stored = {} if execution.node else dict(stored_artifacts(plane, plane.nodes(execution.identifier)))
    # One of several runs or points is not the result of all, and an execution that has not ended may store
    # others.
    if len(stored) > 1 or (stored and phase != SUCCEEDED):
        raise ExportError(f"{execution}: {_lists(phase, stored)}")
    if stored:
        return ExecutionResult(next(iter(stored.values())), plane)
    returned = records(outputs)
    if returned and not folders:
        return ExecutionResult(records=returned)
    raise ExportError(f"{execution}: {_lacks(execution, phase, folders, outputs)}")


def _lists(phase: str, stored: Iterable[str]) -> str:
    """Say that an execution has stored artifacts at these nodes, of which none is its result."""
    of_each = [f"\n  flyte://v1/{node}/o" for node in stored]
    nothing = f"the execution is {phase}, and returns nothing{' yet' * (phase not in FAILED)}; " * (
        phase != SUCCEEDED
    )
    todo = "; give the node of one" + ", or --failed for the report of the failure" * (phase in FAILED)
    return f"{nothing}it has stored {counted(len(of_each), 'artifact')}{todo}:{''.join(of_each)}"


def _lacks(execution: Execution, phase: str, folders: list[str], outputs: Mapping[str, Any]) -> str:
    """Return why nothing can be fetched."""
    if folders:
        return (
            f"{folders[0]}: no artifact.json: a version of Flytune before 0.2.0 stored the folder, without "
            "the list by which its files are verified; copy it with the storage's own tools, or run the "
            "workflow again"
        )
    if execution.node:
        return f"it has neither a folder nor a record as its output (the execution is {phase})"
    if texts := [literal.scalar.primitive.string_value for literal in outputs.values() if _is_text(literal)]:
        return f"the execution is {phase}, and has stored no files; it says: {'; '.join(texts)}"
    todo = "; --failed fetches the report of the failure" * (phase in FAILED)
    return f"the execution is {phase}, and no artifact is stored{todo}"


def stored_artifacts(
    plane: ControlPlane, nodes: Iterable[tuple[Any, list[str]]]
) -> Iterator[tuple[str, str]]:
    """Yield the addresses of the artifacts that nodes have stored, by the nodes' paths."""
    for node, tasks in nodes:
        if STORE in tasks:
            execution = node.id.execution_id
            literals = plane.client.get_node_execution_data(node.id).full_outputs.literals
            if (address := next(filter(None, map(_folder, literals.values())), None)) is not None:
                yield f"{execution.project}/{execution.domain}/{execution.name}/{node.id.node_id}", address


def _folder(literal: Any) -> str | None:
    """Return the address of a folder; None for another value."""
    blob = literal.scalar.blob if literal.scalar is not None else None
    # 1: MULTIPART, a folder.
    return str(blob.uri).rstrip("/") if blob is not None and blob.metadata.type.dimensionality == 1 else None


def records(literals: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of records: msgpack, as flytekit writes dataclasses and pydantic's models, or JSON of
    the console."""
    import msgpack
    from google.protobuf.json_format import MessageToDict

    records = {}
    for name, literal in literals.items():
        if literal.scalar is not None and literal.scalar.binary is not None:
            records[name] = msgpack.unpackb(literal.scalar.binary.value, strict_map_key=False)
        elif literal.scalar is not None and literal.scalar.generic is not None:
            records[name] = MessageToDict(literal.scalar.generic)
    return records


def _is_text(literal: Any) -> bool:
    scalar = literal.scalar
    return scalar is not None and scalar.primitive is not None and bool(scalar.primitive.string_value)
