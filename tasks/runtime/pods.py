"""Pod templates and task declarations for the rows of shapes.yaml and for cluster.yaml; docs/pods.md explains each field."""

import multiprocessing
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from flytekit import PodTemplate, task
from flytekit.extras import accelerators

from flytune.hardware import Cluster, Shape, devices, load_cluster, load_shapes
from flytune.training.preemption import GRACE_SECONDS
from tasks.runtime import termination, volumes
from tasks.runtime.pod_security import PRIMARY, LazyPodTemplate, restrict
from tasks.runtime.retries import classify_failures
from tasks.runtime.schema import without_schema

SCRATCH = "/scratch"
TERMINATION_SECONDS = int(2 * GRACE_SECONDS)
"""Seconds from SIGTERM to SIGKILL: GRACE_SECONDS for the ranks, and as long for their parent to report to Flyte."""
_SHAPE_LABEL = "flytune-shape"
_JOB_LABEL = "training.kubeflow.org/job-name"


def pod_template(shape: Shape, cluster: Cluster) -> PodTemplate:
    """Return the pod template of one node; a new one for each call, because plugins modify it."""
    queue = cluster.queue if _by_volcano(shape, cluster) else None
    annotations = {"scheduling.volcano.sh/queue-name": queue} if queue else {}
    return LazyPodTemplate(lambda: _spec(shape, cluster), {_SHAPE_LABEL: shape.name}, annotations)


def _spec(shape: Shape, cluster: Cluster) -> Any:
    """Return the V1PodSpec of one node; this and what it calls import Kubernetes' client, which takes half a second."""
    from kubernetes.client import V1Container, V1EmptyDirVolumeSource, V1EnvVar, V1PodSpec, V1Volume, V1VolumeMount

    mounted = cluster.volumes_of(shape.name)
    container = V1Container(
        name=PRIMARY,
        env=[V1EnvVar(name=name, value=value) for name, value in _environment(shape).items()],
        # Not Flyte's Resources: they have no network devices, and would replace these.
        resources=_resources(shape, cluster),
        volume_mounts=[
            V1VolumeMount(name="dshm", mount_path="/dev/shm"),
            V1VolumeMount(name="scratch", mount_path=SCRATCH),
            *map(volumes.mount, mounted),
        ],
    )
    memory = V1EmptyDirVolumeSource(medium="Memory", size_limit=f"{shape.shared_memory_gib}Gi")
    spec = V1PodSpec(
        containers=[container],
        volumes=[V1Volume(name="dshm", empty_dir=memory), _scratch(shape, cluster), *map(volumes.source, mounted)],
        termination_grace_period_seconds=TERMINATION_SECONDS,
        # The kernel delivers no signal to PID 1 of a namespace without a handler, and Python has none until a task sets one: a
        # pod would ignore SIGTERM while it imports. In a shared namespace PID 1 is the pause process.
        share_process_namespace=True,
        tolerations=_tolerations(shape, cluster),
        node_selector=shape.node_labels or None,
        affinity=_affinity(shape, cluster) if shape.nodes > 1 else None,
        scheduler_name="volcano" if _by_volcano(shape, cluster) else None,
    )
    return restrict(spec, cluster, mounted, ["IPC_LOCK"] if shape.fabric.locks_memory else [])


def _by_volcano(shape: Shape, cluster: Cluster) -> bool:
    return cluster.gang_scheduling == "volcano" and shape.is_gpu


def _resources(shape: Shape, cluster: Cluster) -> Any:
    """Return requests and equal limits: the pod has the node to itself. Strings: the Kubernetes models refuse numbers."""
    from kubernetes.client import V1ResourceRequirements

    requests = {"cpu": str(shape.cpu), "memory": f"{shape.memory_gib}Gi"}
    if cluster.scratch_storage_class is None:
        requests["ephemeral-storage"] = f"{shape.disk_gib}Gi"
    if shape.is_gpu:
        requests["nvidia.com/gpu"] = str(shape.processes)
    if shape.network_devices:
        requests[shape.fabric.resource(cluster)] = str(shape.network_devices)
    return V1ResourceRequirements(requests=requests, limits=dict(requests))


def _environment(shape: Shape) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1"} if shape.is_gpu else {}
    debug = {"NCCL_DEBUG": "WARN"} if shape.is_gpu and shape.nodes > 1 else {}
    return {"TMPDIR": SCRATCH, "HF_HUB_CACHE": f"{SCRATCH}/hub"} | offline | debug | shape.fabric.environment


def _scratch(shape: Shape, cluster: Cluster) -> Any:
    from kubernetes.client import (
        V1EmptyDirVolumeSource,
        V1EphemeralVolumeSource,
        V1PersistentVolumeClaimSpec,
        V1PersistentVolumeClaimTemplate,
        V1Volume,
        V1VolumeResourceRequirements,
    )

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


def _tolerations(shape: Shape, cluster: Cluster) -> list[Any]:
    from kubernetes.client import V1Toleration

    keys = ["nvidia.com/gpu"] if shape.is_gpu else []
    return [V1Toleration(key=key, operator="Exists") for key in keys + (cluster.spot_taints if shape.spot else [])]


def _affinity(shape: Shape, cluster: Cluster) -> Any:
    """Return an affinity for one zone: required if the network does not cross zones, else preferred."""
    from kubernetes.client import V1Affinity, V1LabelSelector, V1PodAffinity, V1PodAffinityTerm, V1WeightedPodAffinityTerm

    term = V1PodAffinityTerm(
        topology_key=cluster.zone_label,
        label_selector=V1LabelSelector(match_labels={_SHAPE_LABEL: shape.name}),
        # Only pods of the same job. Kubernetes older than 1.31 drops this; then it applies to all runs of the row.
        match_label_keys=[_JOB_LABEL],
    )
    if not shape.fabric.has_devices:
        preferred = [V1WeightedPodAffinityTerm(weight=100, pod_affinity_term=term)]
        return V1Affinity(pod_affinity=V1PodAffinity(preferred_during_scheduling_ignored_during_execution=preferred))
    return V1Affinity(pod_affinity=V1PodAffinity(required_during_scheduling_ignored_during_execution=[term]))


def job_labels(shape: Shape, cluster: Cluster) -> dict[str, str] | None:
    """Return the labels of the job object, where Kueue reads its queue; rows without GPUs are not queued."""
    return {"kueue.x-k8s.io/queue-name": str(cluster.queue)} if cluster.gang_scheduling == "kueue" and shape.is_gpu else None


def accelerator(shape: Shape) -> Any:
    """Return Flyte's accelerator for the shape's GPU, which the cluster turns into node affinity; None if Flyte has none."""
    return getattr(accelerators, shape.accelerator.replace("-", "_"), None) if shape.is_gpu else None


def _after_device_check(execute: Callable[..., Any], shape: Shape) -> Callable[..., Any]:
    """Return a task's `execute` that first compares the node's GPUs with the row, before it fetches or loads a model."""

    def checked(**inputs: Any) -> Any:
        if shape.is_gpu:
            devices.configure_allocator()
            # In another process: one that has used CUDA cannot be forked, and the self-test forks its ranks.
            with classify_failures(), ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
                executor.submit(devices.check, shape).result()
        return execute(**inputs)

    return checked


def declare(function: Callable[..., Any], name: str, shape: Shape, module: dict[str, Any], **arguments: Any) -> Any:
    """Declare a separate Flyte task for one shape: a copy of `function` under `name`, with the shape's pod.

    The copy is added to `module` under that name, because a pod loads its task by module and name. Flyte refuses tasks made
    from inner functions, and one function cannot be two tasks.
    """
    copy = types.FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
    copy.__annotations__, copy.__doc__ = function.__annotations__, function.__doc__
    copy.__qualname__, copy.__module__ = name, function.__module__
    cluster = load_cluster()
    cluster.check_shapes({row.name for row in load_shapes()})
    made = task(
        pod_template=pod_template(shape, cluster),
        accelerator=accelerator(shape),
        interruptible=shape.spot,
        labels=job_labels(shape, cluster),
        **arguments,
    )(copy)
    if "task_config" not in arguments:  # ranks check for themselves, in their own processes
        made.execute = _after_device_check(made.execute, shape)
    made.execute = termination.ignoring_sigterm_after(made.execute)
    module[name] = without_schema(made)
    return module[name]
