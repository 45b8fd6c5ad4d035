"""Pods to look into: copies of a stage's pods that start nothing, have its inputs on disk, and end by
themselves.

Everything is asked of Kubernetes through the user's own kubeconfig: what it does not allow is an error, never
worked around.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from flytune.cluster.debug_program import READY
from flytune.errors import TrainingError

LABEL = "flytune-debug"
"""Label of these pods; its value is the execution."""
_JOB, _INDEX = "training.kubeflow.org/job-name", "training.kubeflow.org/replica-index"
_RENDEZVOUS = "PET_RDZV_ENDPOINT"
_ADDRESS = "FLYTUNE_DEBUG_ADDRESS"
_SECONDS = 10.0
_START_SECONDS = 1800.0
"""Seconds in which a pod must start: a node may have to be made, and pulls the image."""
_OWN = (
    "nodeName",
    "hostname",
    "subdomain",
    "priority",
    "preemptionPolicy",
    "schedulerName",
    "ephemeralContainers",
)
"""Fields of a pod's spec that belong to that pod alone, or that Kubernetes sets."""


class StagePods(NamedTuple):
    """Pods of one attempt of a stage, in the order of their ranks, as Kubernetes' JSON."""

    name: str
    pods: list[dict[str, Any]]
    has_failed: bool


class DebugPod(NamedTuple):
    """A pod to look into."""

    name: str
    namespace: str
    copied: str
    """Name of the pod that it is a copy of."""


class NamespacePods:
    """Pods of one namespace."""

    def __init__(self, client: Any, namespace: str) -> None:
        from kubernetes.client import CoreV1Api, CustomObjectsApi

        self._client, self.namespace = client, namespace
        self._core, self._objects = CoreV1Api(client), CustomObjectsApi(client)

    def stages(self, execution: str) -> list[StagePods]:
        """Return the attempts of an execution's stages whose pods are still there, the newest first."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for pod in self._pods_of(execution):
            groups.setdefault(_attempt_of(pod), []).append(pod)
        stages = []
        for name, pods in groups.items():
            pods.sort(key=lambda pod: int(pod["metadata"].get("labels", {}).get(_INDEX, 0)))
            failed = any(pod.get("status", {}).get("phase") == "Failed" for pod in pods)
            stages.append(StagePods(name, pods, failed))
        return sorted(
            stages, key=lambda stage: str(stage.pods[0]["metadata"].get("creationTimestamp")), reverse=True
        )

    def start(self, manifest: Any, original: dict[str, Any]) -> DebugPod:
        """Start a copy of a pod."""
        created: Any = self._core.create_namespaced_pod(self.namespace, manifest, _request_timeout=_SECONDS)
        return DebugPod(created.metadata.name, self.namespace, original["metadata"]["name"])

    def address(self, pod: DebugPod) -> str:
        """Return the address of a pod that runs."""
        return str(self._status(pod.name).pod_ip)

    def lines(self, pod: DebugPod, waiting: Callable[[str], None]) -> list[str]:
        """Return what a pod's program says, once it waits; `waiting` is called with the reason while it does
        not run yet.

        Raises:
            TrainingError: the pod has ended, or has not started in half an hour.
        """
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            status = self._status(pod.name)
            if status.phase in ("Failed", "Succeeded"):
                raise TrainingError(
                    f"{pod.name}: it has ended: "
                    f"{status.message or self._log(pod.name)[-300:] or status.phase}"
                )
            if status.phase == "Running" and READY in (log := self._log(pod.name)):
                return [line for line in log.splitlines() if not line.endswith(READY)]
            waiting(_reason(status))
            time.sleep(2)
        raise TrainingError(
            f"{pod.name}: it did not start in {_START_SECONDS / 60:.0f} minutes: "
            f"{_reason(self._status(pod.name))}"
        )

    def end(self, execution: str) -> list[str]:
        """Delete all pods to look into of an execution; return their names."""
        listed: Any = self._core.list_namespaced_pod(
            self.namespace, label_selector=f"{LABEL}={execution}", _request_timeout=_SECONDS
        )
        names = [pod.metadata.name for pod in listed.items]
        for name in names:
            self._core.delete_namespaced_pod(
                name, self.namespace, grace_period_seconds=5, _request_timeout=_SECONDS
            )
        return names

    def _pods_of(self, execution: str) -> list[dict[str, Any]]:
        """Return the pods that have the execution in a label or in their names, and those of its jobs."""
        listed: Any = self._core.list_namespaced_pod(self.namespace, _request_timeout=_SECONDS)
        pods = [self._client.sanitize_for_serialization(pod) for pod in listed.items]
        jobs = self._jobs_of(execution)

        def is_of(pod: dict[str, Any]) -> bool:
            labels = pod["metadata"].get("labels") or {}
            if LABEL in labels:
                return False
            name = str(pod["metadata"]["name"])
            return (
                labels.get("execution-id") == execution
                or name.startswith(f"{execution}-")
                or labels.get(_JOB) in jobs
            )

        return [pod for pod in pods if is_of(pod)]

    def _jobs_of(self, execution: str) -> set[str]:
        """Return the names of an execution's training jobs; none where the operator is not there, or is not
        to be read."""
        from kubernetes.client.exceptions import ApiException

        try:
            jobs: Any = self._objects.list_namespaced_custom_object(
                "kubeflow.org",
                "v1",
                self.namespace,
                "pytorchjobs",
                label_selector=f"execution-id={execution}",
            )
        except ApiException as error:
            if error.status in (401, 403, 404):
                return set()
            raise
        return {str(job["metadata"]["name"]) for job in jobs["items"]}

    def _status(self, name: str) -> Any:
        pod: Any = self._core.read_namespaced_pod_status(name, self.namespace, _request_timeout=_SECONDS)
        return pod.status

    def _log(self, name: str) -> str:
        from kubernetes.client.exceptions import ApiException

        try:
            return str(self._core.read_namespaced_pod_log(name, self.namespace, _request_timeout=_SECONDS))
        except ApiException as error:
            if error.status in (400, 404):  # its container is about to start
                return ""
            raise


@contextmanager
def connected(namespace: str) -> Iterator[NamespacePods]:
    """Yield the pods of a namespace, through the kubeconfig.

    Raises:
        TrainingError: there is no kubeconfig, Kubernetes does not answer, or it refuses; the message has its
            words.
    """
    from kubernetes import config
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        client = config.new_client_from_config()
    except config.ConfigException:
        raise TrainingError(
            "kubernetes: there is no valid kubeconfig; set KUBECONFIG to that of the cluster"
        ) from None
    client.configuration.retries = 0
    try:
        yield NamespacePods(client, namespace)
    except ApiException as error:
        do = f"check `kubectl auth can-i create pods -n {namespace}`"
        raise TrainingError(
            f"kubernetes: refuses: {error.status} {error.reason} in namespace {namespace}; {do}"
        ) from None
    except (HTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TrainingError(
            f"kubernetes: does not answer: {reason}; check `kubectl get pods -n {namespace}`"
        ) from None
    finally:
        client.close()


def chosen(stages: Sequence[StagePods], named: str | None, execution: str, namespace: str) -> StagePods:
    """Return the newest failed attempt, or the newest that runs; with a name, of the stages that have it.

    Raises:
        TrainingError: no pod is left of what is named.
    """
    fitting = [stage for stage in stages if named is None or named.replace("_", "-") in stage.name]
    if not fitting:
        left = ", ".join(dict.fromkeys(stage.name for stage in stages)) or "no pod"
        wanted = f"{named} of {execution}" if named else execution
        raise TrainingError(
            f"{wanted}: no pod is left in namespace {namespace} ({left} is there): pods can be copied while "
            "they exist; another namespace: --namespace"
        )
    return next((stage for stage in fitting if stage.has_failed), fitting[0])


def copy_of(
    pod: dict[str, Any], execution: str, seconds: float, meeting: str | None = None
) -> dict[str, Any]:
    """Return the manifest of a pod like another one, which waits instead of running the stage.

    Image, code, resources, environment, volumes, security, tolerations and affinity are the other pod's;
    owner, labels and node are not, so that no job counts it, and no service finds it.

    Args:
        seconds: time after which it ends by itself.
        meeting: address of the first of several pods, where the ranks meet; None for the first.
    """
    metadata, spec = pod["metadata"], {key: value for key, value in pod["spec"].items() if key not in _OWN}
    primary = _primary(pod)
    command = [*(primary.get("command") or []), *(primary.get("args") or [])]
    container = {
        key: value
        for key, value in primary.items()
        if not key.endswith("Probe") and key not in ("command", "lifecycle")
    }
    program = ["python", "-m", "flytune.cluster.debug_program", str(int(seconds)), "--"]
    if "--" in command:  # fast registration: the code is unpacked first
        place = command.index("--") + 1
        container["args"] = [*command[:place], *program, *command[place:]]
    else:
        container["args"] = [*program, *command]
    container["env"] = _environment(primary.get("env") or [], meeting)
    init = [
        init_container
        for init_container in spec.pop("initContainers", None) or []
        if init_container["name"] != "init-pytorch"
    ]
    spec |= {"containers": [container], "restartPolicy": "Never", "activeDeadlineSeconds": int(seconds)}
    if init:
        spec["initContainers"] = init
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": f"{metadata['name'][:40]}-debug-", "labels": {LABEL: execution}},
        "spec": spec,
    }


def _environment(variables: list[dict[str, Any]], meeting: str | None) -> list[dict[str, Any]]:
    endpoint = next(
        (str(variable.get("value", "")) for variable in variables if variable["name"] == _RENDEZVOUS), ""
    )
    if not endpoint:
        return variables
    pod_address = {"name": _ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    port = endpoint.rpartition(":")[2]
    address = {"name": _RENDEZVOUS, "value": f"{meeting or f'$({_ADDRESS})'}:{port}"}
    return [pod_address, *(variable for variable in variables if variable["name"] != _RENDEZVOUS), address]


def _primary(pod: dict[str, Any]) -> dict[str, Any]:
    containers: list[dict[str, Any]] = pod["spec"]["containers"]
    named = (pod["metadata"].get("annotations") or {}).get("primary_container_name")
    return next(
        (container for container in containers if container["name"] in (named, "pytorch", "primary")),
        containers[0],
    )


def _attempt_of(pod: dict[str, Any]) -> str:
    """Return the name of the attempt whose pod it is: its job, or its own name, with the task's where a label
    has it."""
    labels = pod["metadata"].get("labels") or {}
    task = labels.get("task-name") or _task_of(pod)
    return f"{task} ({labels.get(_JOB) or pod['metadata']['name']})"


def _task_of(pod: dict[str, Any]) -> str:
    """Return the name of the task by the pod's command, which ends with the module and name by which it is
    loaded."""
    words = [*(_primary(pod).get("command") or []), *(_primary(pod).get("args") or [])]
    if "task-name" in words[:-1]:
        return str(words[words.index("task-name") + 1]).replace("_", "-")
    return "stage"


def _reason(status: Any) -> str:
    for container in status.container_statuses or []:
        if container.state and container.state.waiting and container.state.waiting.reason:
            return str(container.state.waiting.reason)
    for condition in status.conditions or []:
        if condition.status == "False" and condition.message:
            return " ".join(str(condition.message).split())[:200]
    return str(status.phase)
