"""The artifact that an execution stored: found through flyteadmin, and read by addresses that flyteadmin signs.

Besides the doctor this is the only module of flytune that knows Flyte. It needs no credentials for the cluster's storage.
"""

import re
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

from flytune.artifacts.fetch import Reader
from flytune.doctor import admin
from flytune.doctor.finding import NO_CLUSTER
from flytune.errors import ExportError

STORE = "tasks.store.store_artifact"
"""The task whose output is the artifact."""
_NAME = r"[a-z][a-z0-9-]*"
_ADDRESSES = (
    re.compile(r"https?://.*/projects/(?P<project>[^/]+)/domains/(?P<domain>[^/]+)/executions/(?P<name>[^/?#]+)"),
    re.compile(r"flyte://v1/(?P<project>[^/]+)/(?P<domain>[^/]+)/(?P<name>[^/]+)(?:/(?P<node>[^/]+)(?:/.*)?)?"),
    re.compile(rf"(?P<name>{_NAME})"),
)
_SECONDS = 60.0


class Execution(NamedTuple):
    """An execution, or one node of it."""

    project: str
    domain: str
    name: str
    node: str | None = None

    def __str__(self) -> str:
        return f"{self.name} in {self.project}-{self.domain}" + (f", node {self.node}" if self.node else "")


def parse(text: str, project: str, domain: str) -> Execution | None:
    """Return the execution of an id, an address of the console or a flyte:// address; None for any other address.

    `project` and `domain` apply to an id.
    """
    for pattern in _ADDRESSES:
        if found := pattern.match(text.strip()) if pattern is _ADDRESSES[0] else pattern.fullmatch(text.strip()):
            return Execution(**({"project": project, "domain": domain} | found.groupdict()))
    return None


def find_artifact(execution: Execution) -> tuple[str, Reader]:
    """Return the address of the artifact that the execution stored, and access to its files.

    Raises:
        ExportError: flyteadmin does not know it, or it stored no artifact, or several.
    """
    import grpc
    from flytekit.clients.friendly import SynchronousFlyteClient
    from flytekit.configuration import PlatformConfig
    from flytekit.exceptions.base import FlyteException
    from flytekit.exceptions.user import FlyteEntityNotExistException

    config = admin.config_file()
    platform = PlatformConfig.auto(str(config)) if config else PlatformConfig.auto()
    if config is None and platform.endpoint == PlatformConfig().endpoint:
        raise ExportError(f"{execution}: no cluster is configured: {NO_CLUSTER}")
    try:
        client = SynchronousFlyteClient(platform)
        address = _address(client, execution)
        return address, _signed(client, platform, address)
    except FlyteEntityNotExistException:
        raise ExportError(f"{execution}: {platform.endpoint} has no such execution; give --project and --domain") from None
    except (grpc.RpcError, FlyteException, RuntimeError) as error:
        raise ExportError(f"{execution}: {platform.endpoint}: {admin.line(error)}") from error


def _address(client: Any, execution: Execution) -> str:
    from flytekit.models.core.execution import WorkflowExecutionPhase
    from flytekit.models.core.identifier import NodeExecutionIdentifier, WorkflowExecutionIdentifier

    of = WorkflowExecutionIdentifier(execution.project, execution.domain, execution.name)
    phase = WorkflowExecutionPhase.enum_to_string(client.get_execution(of).closure.phase)
    if execution.node:
        address = _output(client, NodeExecutionIdentifier(execution.node, of))
        if address is None:
            raise ExportError(f"{execution}: it has no folder as its output (the execution is {phase})")
        return address
    found = dict(_stored(client, of))
    if not found:
        raise ExportError(f"{execution}: the execution is {phase}, and no artifact is stored")
    if len(found) > 1:
        of_each = "".join(f"\n  flyte://v1/{name}/o" for name in found)
        raise ExportError(f"{execution}: it has stored {len(found)} artifacts; give the node of one:{of_each}")
    return next(iter(found.values()))


def _stored(client: Any, execution: Any, parent: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield addresses of all artifacts of an execution, of workflows in it and of executions that it launched, by node."""
    from flytekit.clients.helpers import iterate_node_executions, iterate_task_executions

    for node in iterate_node_executions(client, execution, unique_parent_id=parent):
        launched = node.closure.workflow_node_metadata
        if launched is not None:
            yield from _stored(client, launched.execution_id)
        elif node.metadata.is_parent_node:
            yield from _stored(client, execution, node.id.node_id)
        elif any(task.id.task_id.name == STORE for task in iterate_task_executions(client, node.id)):
            address = _output(client, node.id)
            if address is not None:
                yield f"{execution.project}/{execution.domain}/{execution.name}/{node.id.node_id}", address


def _output(client: Any, node: Any) -> str | None:
    """Return the address of the folder that a node has returned."""
    for literal in client.get_node_execution_data(node).full_outputs.literals.values():
        if literal.scalar is not None and literal.scalar.blob is not None:
            return str(literal.scalar.blob.uri).rstrip("/")
    return None


def _signed(client: Any, platform: Any, address: str) -> Reader:
    import requests

    verify = False if platform.insecure_skip_verify else platform.ca_cert_file_path

    def opened(name: str) -> Any:
        link = client.get_download_signed_url(f"{address}/{name}").signed_url
        try:
            answer = requests.get(link, stream=True, verify=verify, timeout=_SECONDS)
        except requests.RequestException as error:  # its text contains the signed address
            raise ConnectionError(f"the storage does not answer: {type(error).__name__}") from None
        if answer.status_code == 404:
            raise FileNotFoundError(name)
        if not answer.ok:
            raise PermissionError(f"the storage answers {answer.status_code}")
        answer.raw.decode_content = True
        return answer

    def get(name: str, to: str) -> None:
        with opened(name) as answer, open(to, "wb") as file:
            shutil.copyfileobj(answer.raw, file, 8 * 2**20)

    return Reader(lambda name: bytes(opened(name).content), get)
