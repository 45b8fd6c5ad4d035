"""Checks of Kubernetes, through kubectl's kubeconfig."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from flytune.doctor import nodes as cluster_nodes
from flytune.doctor import settings
from flytune.doctor.finding import Finding, fail, ok
from flytune.doctor.nodes import Kubernetes, Node
from flytune.doctor.volumes import Claim, ClusterVolumes
from flytune.hardware import Cluster, Shape
from flytune.hardware.shapes import GIB

T = TypeVar("T")
_REPELLING = ("NoSchedule", "NoExecute")
_SECONDS = 10.0
_NOT_CHECKED = "operator, nodes, gang scheduler, secrets and volumes were not checked"


def findings(
    namespace: str, shapes: tuple[Shape, ...], cluster: Cluster, *, with_settings: bool = True
) -> Iterator[Finding]:
    """Check everything, with secrets in `namespace`; without access to Kubernetes, yield one finding with the
    reason.

    Args:
        with_settings: whether Flyte's own settings are checked; those of Flyte 2 are others.
    """
    if importlib.util.find_spec("kubernetes") is None:
        yield ok(
            "kubernetes",
            f"{_NOT_CHECKED}: its client is not installed; install it with `pip install kubernetes`",
        )
        return
    from kubernetes import config
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        client = config.new_client_from_config()
    except config.ConfigException:
        yield ok("kubernetes", f"{_NOT_CHECKED}: there is no valid kubeconfig; set KUBECONFIG to check them")
        return
    client.configuration.retries = 0
    try:
        yield from cluster_nodes.findings(_facts(client, namespace, cluster), shapes, cluster)
        if with_settings:
            yield from settings.findings(_settings(client), shapes)
    except ApiException as error:
        reason = f"refuses access: {error.status} {error.reason}"
        yield fail("kubernetes", f"{reason}; {_NOT_CHECKED}", "check `kubectl auth can-i list nodes`")
    except (HTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        yield fail(
            "kubernetes",
            f"does not answer: {reason}; {_NOT_CHECKED}",
            "check `kubectl get nodes`, or the context",
        )
    finally:
        client.close()


def _facts(client: Any, namespace: str, cluster: Cluster) -> Kubernetes:
    from kubernetes.client import ApiextensionsV1Api, CoreV1Api

    core = CoreV1Api(client)
    nodes: Any = core.list_node(_request_timeout=_SECONDS).items
    definitions: Any = (
        ApiextensionsV1Api(client).list_custom_resource_definition(_request_timeout=_SECONDS).items
    )
    named = {secret.group for secret in cluster.secrets.all if secret.group}
    return Kubernetes(
        address=client.configuration.host,
        resources=[definition.metadata.name for definition in definitions],
        nodes=[_node(node) for node in nodes if not node.spec.unschedulable],
        namespace=namespace,
        secrets={name: keys for name in sorted(named) for keys in _keys(core, name, namespace)},
        storage=_storage(client, core, namespace, cluster),
    )


def _settings(client: Any) -> dict[str, Any] | None:
    """Return Flyte's configuration; None if access is denied."""
    from kubernetes.client import CoreV1Api

    listed: Any = _read(
        lambda: CoreV1Api(client).list_config_map_for_all_namespaces(
            label_selector=settings.LABEL, _request_timeout=_SECONDS
        )
    )
    if listed == [None]:
        return None
    maps = [item for answer in listed for item in answer.items]
    return settings.merged([item.data or {} for item in sorted(maps, key=lambda item: item.metadata.name)])


def _node(node: Any) -> Node:
    from kubernetes.utils.quantity import parse_quantity

    has = {
        name: float(parse_quantity(quantity)) for name, quantity in (node.status.allocatable or {}).items()
    }
    return Node(
        name=node.metadata.name,
        labels=node.metadata.labels or {},
        taints=[taint.key for taint in node.spec.taints or [] if taint.effect in _REPELLING],
        cpu=has.pop("cpu", 0.0),
        memory_gib=has.pop("memory", 0.0) / GIB,
        disk_gib=has.pop("ephemeral-storage", 0.0) / GIB,
        resources=has,
    )


def _keys(core: Any, name: str, namespace: str) -> list[list[str] | None]:
    """Return a list with the secret's keys (without values), as `_read` does."""
    return _read(
        lambda: sorted(core.read_namespaced_secret(name, namespace, _request_timeout=_SECONDS).data or {})
    )


def _storage(client: Any, core: Any, namespace: str, cluster: Cluster) -> ClusterVolumes:
    from kubernetes.client import StorageV1Api

    def claim(name: str) -> Claim:
        claimed = core.read_namespaced_persistent_volume_claim(name, namespace, _request_timeout=_SECONDS)
        phase = claimed.status.phase or "Pending"
        modes = (claimed.status.access_modes if phase == "Bound" else None) or claimed.spec.access_modes
        return Claim(phase=phase, access_modes=modes or [])

    def drivers() -> dict[str, list[str]]:
        listed: Any = StorageV1Api(client).list_csi_driver(_request_timeout=_SECONDS).items
        # Kubernetes' default of the field is Persistent.
        return {
            driver.metadata.name: driver.spec.volume_lifecycle_modes or ["Persistent"] for driver in listed
        }

    named = dict.fromkeys(
        name for volume in cluster.volumes if (name := volume.persistent_volume_claim) is not None
    )
    return ClusterVolumes(
        claims={name: described for name in named for described in _read(partial(claim, name))},
        drivers=(_read(drivers) or [{}])[0] if any(volume.csi for volume in cluster.volumes) else {},
    )


def _read(request: Callable[[], T]) -> list[T | None]:
    """Return a list with a request's result: empty if the object does not exist, with None if access is
    denied."""
    from kubernetes.client.exceptions import ApiException

    try:
        return [request()]
    except ApiException as error:
        if error.status == 404:
            return []
        if error.status in (401, 403):
            return [None]
        raise
