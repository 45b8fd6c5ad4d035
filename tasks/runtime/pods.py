"""A row of shapes.yaml as Flyte sees it, on the cluster that cluster.yaml tells of; docs/pods.md says why, field by field."""

import multiprocessing
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from flytekit import PodTemplate, task
from flytekit.extras import accelerators
from kubernetes.client import (
    V1Affinity,
    V1Capabilities,
    V1Container,
    V1EmptyDirVolumeSource,
    V1EnvVar,
    V1EphemeralVolumeSource,
    V1LabelSelector,
    V1PersistentVolumeClaimSpec,
    V1PersistentVolumeClaimTemplate,
    V1PodAffinity,
    V1PodAffinityTerm,
    V1PodSecurityContext,
    V1PodSpec,
    V1ResourceRequirements,
    V1SecurityContext,
    V1Toleration,
    V1Volume,
    V1VolumeMount,
    V1VolumeResourceRequirements,
    V1WeightedPodAffinityTerm,
)

from flytune.hardware import devices
from flytune.hardware.cluster import Cluster, load_cluster
from flytune.hardware.shapes import Shape
from flytune.training.preemption import GRACE_SECONDS
from tasks.runtime import ending
from tasks.runtime.retries import retried
from tasks.runtime.schema import trimmed

PRIMARY = "primary"
SCRATCH = "/scratch"
USER = 10001
"""The images' user (Dockerfile)."""
TERMINATION_SECONDS = int(2 * GRACE_SECONDS)
"""From SIGTERM to SIGKILL: ranks have GRACE_SECONDS whatever they train, and their parent as long again to tell Flyte."""
_SHAPE_LABEL = "flytune-shape"
_JOB_LABEL = "training.kubeflow.org/job-name"


def pod_template(shape: Shape, cluster: Cluster) -> PodTemplate:
    """One node's pod; a new one at each call: plugins write in it."""
    container = V1Container(
        name=PRIMARY,
        env=[V1EnvVar(name=name, value=value) for name, value in _environment(shape).items()],
        # Not Flyte's Resources: those know no network devices, and replace what stands here.
        resources=_resources(shape, cluster),
        volume_mounts=[V1VolumeMount(name="dshm", mount_path="/dev/shm"), V1VolumeMount(name="scratch", mount_path=SCRATCH)],
    )
    if shape.fabric.locks_memory:
        container.security_context = V1SecurityContext(capabilities=V1Capabilities(add=["IPC_LOCK"]))
    by_volcano = cluster.gang_scheduling == "volcano" and shape.is_gpu
    memory = V1EmptyDirVolumeSource(medium="Memory", size_limit=f"{shape.shared_memory_gib}Gi")
    spec = V1PodSpec(
        containers=[container],
        volumes=[V1Volume(name="dshm", empty_dir=memory), _scratch(shape, cluster)],
        security_context=V1PodSecurityContext(fs_group=USER, fs_group_change_policy="OnRootMismatch"),
        termination_grace_period_seconds=TERMINATION_SECONDS,
        # The kernel hands a namespace's PID 1 no signal that it has no handler for, and Python has none until a task sets it: a
        # pod that imports would outlive SIGTERM. In a shared one PID 1 is the pause process.
        share_process_namespace=True,
        tolerations=_tolerations(shape, cluster),
        node_selector=shape.node_labels or None,
        affinity=_affinity(shape, cluster) if shape.nodes > 1 else None,
        scheduler_name="volcano" if by_volcano else None,
    )
    return PodTemplate(
        pod_spec=spec,
        primary_container_name=PRIMARY,
        labels={_SHAPE_LABEL: shape.name},
        annotations={"scheduling.volcano.sh/queue-name": cluster.queue} if by_volcano and cluster.queue else None,
    )


def _resources(shape: Shape, cluster: Cluster) -> V1ResourceRequirements:
    """Requests, and the same as limits: a node is the pod's own. Strings: the Kubernetes models refuse numbers."""
    asked = {"cpu": str(shape.cpu), "memory": f"{shape.memory_gib}Gi"}
    if cluster.scratch_storage_class is None:
        asked["ephemeral-storage"] = f"{shape.disk_gib}Gi"
    if shape.is_gpu:
        asked["nvidia.com/gpu"] = str(shape.processes)
    if shape.network_devices:
        asked[shape.fabric.resource(cluster)] = str(shape.network_devices)
    return V1ResourceRequirements(requests=asked, limits=dict(asked))


def _environment(shape: Shape) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1"} if shape.is_gpu else {}
    talk = {"NCCL_DEBUG": "WARN"} if shape.is_gpu and shape.nodes > 1 else {}
    return {"TMPDIR": SCRATCH, "HF_HUB_CACHE": f"{SCRATCH}/hub"} | offline | talk | shape.fabric.environment


def _scratch(shape: Shape, cluster: Cluster) -> V1Volume:
    size = f"{shape.disk_gib}Gi"
    if cluster.scratch_storage_class is None:
        return V1Volume(name="scratch", empty_dir=V1EmptyDirVolumeSource(size_limit=size))
    claim = V1PersistentVolumeClaimSpec(
        access_modes=["ReadWriteOnce"],
        storage_class_name=cluster.scratch_storage_class,
        resources=V1VolumeResourceRequirements(requests={"storage": size}),
    )
    template = V1PersistentVolumeClaimTemplate(spec=claim)
    return V1Volume(name="scratch", ephemeral=V1EphemeralVolumeSource(volume_claim_template=template))


def _tolerations(shape: Shape, cluster: Cluster) -> list[V1Toleration]:
    keys = ["nvidia.com/gpu"] if shape.is_gpu else []
    return [V1Toleration(key=key, operator="Exists") for key in keys + (cluster.spot_taints if shape.spot else [])]


def _affinity(shape: Shape, cluster: Cluster) -> V1Affinity:
    """The nodes of one run in one zone: always, where their network ends with it; else where there is room."""
    term = V1PodAffinityTerm(
        topology_key=cluster.zone_label,
        label_selector=V1LabelSelector(match_labels={_SHAPE_LABEL: shape.name}),
        # The pod's own value: no other run's pods. Dropped by what is older than Kubernetes 1.31; then all runs of the row.
        match_label_keys=[_JOB_LABEL],
    )
    if not shape.fabric.has_devices:
        preferred = [V1WeightedPodAffinityTerm(weight=100, pod_affinity_term=term)]
        return V1Affinity(pod_affinity=V1PodAffinity(preferred_during_scheduling_ignored_during_execution=preferred))
    return V1Affinity(pod_affinity=V1PodAffinity(required_during_scheduling_ignored_during_execution=[term]))


def rendezvous(cluster: Cluster) -> dict[str, int]:
    """Timeouts of torchrun, in seconds; read_timeout would stay at torch's 60 otherwise."""
    return dict.fromkeys(("timeout", "join_timeout", "read_timeout"), int(cluster.node_start_minutes * 60))


def job_labels(shape: Shape, cluster: Cluster) -> dict[str, str] | None:
    """Of the job object, where Kueue looks; rows without GPUs do not queue for them."""
    return {"kueue.x-k8s.io/queue-name": str(cluster.queue)} if cluster.gang_scheduling == "kueue" and shape.is_gpu else None


def accelerator(shape: Shape) -> Any:
    """Flyte's name for the shape's GPU, which the cluster turns into a node selector; None where Flyte has none."""
    return getattr(accelerators, shape.accelerator.replace("-", "_"), None) if shape.is_gpu else None


def _on_its_devices(execute: Callable[..., Any], shape: Shape) -> Callable[..., Any]:
    """Return a task's `execute` that compares the node's GPUs with the row first: before it fetches a model, or asks one."""

    def compared(**inputs: Any) -> Any:
        if shape.is_gpu:
            devices.configure_allocator()
            # In a process of its own: one that has used CUDA cannot be forked, and the self-test forks its ranks.
            with retried(), ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as apart:
                apart.submit(devices.check, shape).result()
        return execute(**inputs)

    return compared


def declare(function: Callable[..., Any], name: str, shape: Shape, module: dict[str, Any], **arguments: Any) -> Any:
    """A Flyte task of its own for one shape: `function` under another name, declared with the shape's pod.

    The copy stands in its module under that name, for a pod finds its task by module and name. Flyte refuses tasks made
    from inner functions, and one function cannot be two tasks.
    """
    copy = types.FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
    copy.__annotations__, copy.__doc__ = function.__annotations__, function.__doc__
    copy.__qualname__, copy.__module__ = name, function.__module__
    cluster = load_cluster()
    made = task(
        pod_template=pod_template(shape, cluster),
        accelerator=accelerator(shape),
        interruptible=shape.spot,
        labels=job_labels(shape, cluster),
        **arguments,
    )(copy)
    if "task_config" not in arguments:  # ranks compare for themselves, in processes of their own
        made.execute = _on_its_devices(made.execute, shape)
    made.execute = ending.storing(made.execute)
    module[name] = trimmed(made)
    return module[name]
