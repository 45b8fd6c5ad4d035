"""Flyteadmin, through flytekit's client, and the storage through addresses that it signs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flytune.errors import ExportError, chain

NO_CLUSTER = (
    "start Flyte's sandbox with `flytectl demo start` (it needs docker), then "
    "`export FLYTECTL_CONFIG=~/.flyte/config-sandbox.yaml`; for an existing cluster: `flytectl config init "
    "--host=HOST`"
)
"""Advice for a user without a cluster."""
_SECONDS = 60.0


def config_file() -> Path | None:
    """Return the configuration file that pyflyte uses, if any: FLYTECTL_CONFIG, ./flytekit.config,
    ~/.flyte/config(.yaml)."""
    from flytekit.configuration.file import get_config_file

    config = get_config_file(None)
    return Path(config._location) if config else None  # there is no public attribute for it


def platform_of(config: Path | None) -> Any:
    """Return the platform of a configuration file, or of the environment; None if no cluster is
    configured."""
    from flytekit.configuration import PlatformConfig

    platform = PlatformConfig.auto(str(config)) if config else PlatformConfig.auto()
    return None if config is None and platform.endpoint == PlatformConfig().endpoint else platform


def client_of(platform: Any, retries: bool = True) -> Any:
    """Return the client of a platform's flyteadmin; without `retries` it calls once."""
    from flytekit.clients.friendly import SynchronousFlyteClient

    return SynchronousFlyteClient(platform if retries else replace(platform, rpc_retries=0))


def certificates(platform: Any) -> Any:
    """Return what `requests` verifies a platform's storage with."""
    return False if platform.insecure_skip_verify else platform.ca_cert_file_path


def errors() -> tuple[type[Exception], ...]:
    """Return the errors of a call. flytekit wraps some of gRPC's in RuntimeError."""
    import grpc
    from flytekit.exceptions.base import FlyteException

    return grpc.RpcError, FlyteException, RuntimeError


def line(error: BaseException) -> str:
    """Return the root cause of an error of flytekit or gRPC, on one line."""
    import grpc

    cause = list(chain(error, contexts="none"))[-1]
    if isinstance(cause, grpc.Call):  # its text has many lines
        return f"{cause.code().name}: {cause.details()}"[:300]
    return " ".join(str(cause).split())[:300] or type(cause).__name__


class ControlPlane(NamedTuple):
    """Flyteadmin, and the storage through addresses that it signs; executions are given by their identifiers
    in flytekit's models."""

    client: Any
    platform: Any

    def closure(self, execution: Any) -> tuple[str, Any]:
        """Return the name of an execution's phase, and its closure."""
        from flytekit.models.core.execution import WorkflowExecutionPhase

        closure = self.client.get_execution(execution).closure
        return str(WorkflowExecutionPhase.enum_to_string(closure.phase)), closure

    def outputs(self, execution: Any, node: str | None = None) -> Any:
        """Return the literals that an execution has returned, or one node of it."""
        from flytekit.models.core.identifier import NodeExecutionIdentifier

        if node:
            return self.client.get_node_execution_data(
                NodeExecutionIdentifier(node, execution)
            ).full_outputs.literals
        return self.client.get_execution_data(execution).full_outputs.literals

    def nodes(self, execution: Any, parent: str | None = None) -> Iterator[tuple[Any, list[str]]]:
        """Yield all nodes of an execution, of workflows in it and of executions that it launched, with the
        names of their tasks."""
        from flytekit.clients.helpers import iterate_node_executions, iterate_task_executions

        for node in iterate_node_executions(self.client, execution, unique_parent_id=parent):
            launched = node.closure.workflow_node_metadata
            if launched is not None:
                yield from self.nodes(launched.execution_id)
            elif node.metadata.is_parent_node:
                yield from self.nodes(execution, node.id.node_id)
            else:
                yield node, [task.id.task_id.name for task in iterate_task_executions(self.client, node.id)]

    def content(self, address: str) -> bytes:
        """Return the content of a small file of the storage.

        Raises:
            FileNotFoundError: there is none.
            OSError: the storage does not answer, or refuses.
        """
        return bytes(self.opened(address).content)

    def opened(self, address: str) -> Any:
        """Return the answer of the storage with a file, whose content is not read yet.

        Raises:
            FileNotFoundError: there is none.
            OSError: the storage does not answer, or refuses.
        """
        import requests

        link = self.client.get_download_signed_url(address).signed_url
        try:
            answer = requests.get(link, stream=True, verify=certificates(self.platform), timeout=_SECONDS)
        except requests.RequestException as error:  # its text contains the signed address
            raise ConnectionError(f"the storage does not answer: {type(error).__name__}") from None
        if answer.status_code == 404:
            raise FileNotFoundError(address)
        if not answer.ok:
            raise PermissionError(f"the storage answers {answer.status_code}")
        answer.raw.decode_content = True
        return answer


def identifier(project: str, domain: str, name: str) -> Any:
    """Return an execution's identifier in flytekit's models."""
    from flytekit.models.core.identifier import WorkflowExecutionIdentifier

    return WorkflowExecutionIdentifier(project, domain, name)


@contextmanager
def connected(execution: object) -> Iterator[ControlPlane]:
    """Yield the configured control plane; its errors are an ExportError about the execution.

    Raises:
        ExportError: none is configured, it does not know the execution, or it does not answer.
    """
    from flytekit.exceptions.user import FlyteEntityNotExistException

    platform = platform_of(config_file())
    if platform is None:
        raise ExportError(f"{execution}: no cluster is configured: {NO_CLUSTER}")
    try:
        yield ControlPlane(client_of(platform), platform)
    except FlyteEntityNotExistException:
        raise ExportError(
            f"{execution}: {platform.endpoint} has no such execution; give --project and --domain"
        ) from None
    except errors() as error:
        raise ExportError(f"{execution}: {platform.endpoint}: {line(error)}") from error
