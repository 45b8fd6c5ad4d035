"""V1PodSpec of the pods of a shape and of the light tasks; docs/pods.md explains each field.

Kubernetes' client is imported where a spec is made, which is where a task is registered: it takes half a
second.
"""

import os
from collections.abc import Mapping
from typing import Any

from flytune.hardware import Cluster, Shape, Volume
from flytune.pods.security import PRIMARY, Image, restrict


def volume_mount(volume: Volume) -> Any:
    """Return the container's mount of a volume."""
    from kubernetes.client import V1VolumeMount

    return V1VolumeMount(
        name=volume.name, mount_path=volume.mount_path, read_only=True if volume.read_only else None
    )


def volume_source(volume: Volume) -> Any:
    """Return the pod's volume."""
    from kubernetes.client import (
        V1CSIVolumeSource,
        V1HostPathVolumeSource,
        V1LocalObjectReference,
        V1NFSVolumeSource,
        V1PersistentVolumeClaimVolumeSource,
        V1Volume,
    )

    read_only = True if volume.read_only else None
    if (claim := volume.persistent_volume_claim) is not None:
        of_claim = V1PersistentVolumeClaimVolumeSource(claim_name=claim, read_only=read_only)
        return V1Volume(name=volume.name, persistent_volume_claim=of_claim)
    if (csi := volume.csi) is not None:
        of_driver = V1CSIVolumeSource(
            driver=csi.driver,
            fs_type=csi.fs_type,
            volume_attributes=csi.volume_attributes or None,
            node_publish_secret_ref=V1LocalObjectReference(name=csi.node_publish_secret)
            if csi.node_publish_secret
            else None,
            read_only=read_only,
        )
        return V1Volume(name=volume.name, csi=of_driver)
    if (nfs := volume.nfs) is not None:
        return V1Volume(
            name=volume.name, nfs=V1NFSVolumeSource(server=nfs.server, path=nfs.path, read_only=read_only)
        )
    assert volume.host_path is not None
    # Directory: a path that does not exist is an error of the pod, and no empty folder of root.
    return V1Volume(
        name=volume.name, host_path=V1HostPathVolumeSource(path=volume.host_path, type="Directory")
    )


GRACE_SECONDS = 30.0
"""Seconds from SIGTERM to SIGKILL of a rank: torchelastic's, which cannot be configured, and Kubernetes'
default."""
NODE = "FLYTUNE_NODE"
"""Variable of a pod with the name of its node."""
NAMESPACE = "FLYTUNE_NAMESPACE"
"""Variable of a pod with its namespace: Flyte 1 has one for each project and domain, Flyte 2's open backend
one for all."""
ACTION = "FLYTUNE_ACTION"
"""Variable of a pod of Flyte 2 with the name of its action, in which Flyte counts attempts."""
EXECUTION = "FLYTE_INTERNAL_EXECUTION_ID"
"""Variable of a pod with the identifier of its execution; Flyte 2's pods set it themselves."""
RETRIES = "FLYTUNE_RETRIES"
"""Variable of a pod with the number of attempts after the first."""
SCRATCH = "/scratch"
TERMINATION_SECONDS = int(2 * GRACE_SECONDS)
"""Seconds from SIGTERM to SIGKILL: GRACE_SECONDS for the ranks, and as long for their parent to report to
Flyte."""
_SHAPE_LABEL = "flytune-shape"
_JOB_LABEL = "training.kubeflow.org/job-name"


def attempts_before() -> int:
    """Return how many attempts of this pod's task came before this one, as Flyte counts; 0 outside of
    Flyte."""
    return int(os.environ.get("FLYTE_ATTEMPT_NUMBER") or 0)


def labels(shape: Shape) -> dict[str, str]:
    """Return the labels of a shape's pods."""
    return {_SHAPE_LABEL: shape.name}


def annotations(shape: Shape, cluster: Cluster) -> dict[str, str]:
    """Return the annotations of a shape's pods."""
    queue = cluster.queue if _by_volcano(shape, cluster) else None
    return {"scheduling.volcano.sh/queue-name": queue} if queue else {}


def of_light_task(cluster: Cluster, image: Image, environment: Mapping[str, str]) -> Any:
    """Return the V1PodSpec of a light task: its volumes of cluster.yaml, its variables, and its security."""
    from kubernetes.client import V1Container, V1PodSpec

    mounted = cluster.volumes_of(None)
    container = V1Container(
        name=PRIMARY,
        env=[*_variables(environment), _of_pod(NAMESPACE, "metadata.namespace")],
        volume_mounts=[volume_mount(volume) for volume in mounted] or None,
    )
    spec = V1PodSpec(containers=[container], volumes=[volume_source(volume) for volume in mounted] or None)
    return restrict(spec, cluster, mounted, image)


def of_shape(shape: Shape, cluster: Cluster, image: Image) -> Any:
    """Return the V1PodSpec of one node."""
    from kubernetes.client import V1Container, V1EmptyDirVolumeSource, V1PodSpec, V1Volume, V1VolumeMount

    mounted = cluster.volumes_of(shape.name)
    container = V1Container(
        name=PRIMARY,
        env=[
            *_variables(_environment(shape)),
            _of_pod(NODE, "spec.nodeName"),
            _of_pod(NAMESPACE, "metadata.namespace"),
        ],
        # Not Flyte's Resources: they have no network devices, and would replace these.
        resources=_resources(shape, cluster),
        volume_mounts=[
            V1VolumeMount(name="dshm", mount_path="/dev/shm"),
            V1VolumeMount(name="scratch", mount_path=SCRATCH),
            *map(volume_mount, mounted),
        ],
    )
    memory = V1EmptyDirVolumeSource(medium="Memory", size_limit=f"{shape.shared_memory_gib}Gi")
    spec = V1PodSpec(
        containers=[container],
        volumes=[
            V1Volume(name="dshm", empty_dir=memory),
            _scratch(shape, cluster),
            *map(volume_source, mounted),
        ],
        termination_grace_period_seconds=TERMINATION_SECONDS,
        # The kernel delivers no signal to PID 1 of a namespace without a handler, and Python has none until a
        # task sets one: a pod would ignore SIGTERM while it imports. In a shared namespace PID 1 is the pause
        # process.
        share_process_namespace=True,
        tolerations=_tolerations(shape, cluster),
        node_selector=shape.node_labels or None,
        affinity=_affinity(shape, cluster) if shape.nodes > 1 else None,
        scheduler_name="volcano" if _by_volcano(shape, cluster) else None,
    )
    return restrict(spec, cluster, mounted, image, ["IPC_LOCK"] if shape.fabric.locks_memory else [])


def _by_volcano(shape: Shape, cluster: Cluster) -> bool:
    return cluster.gang_scheduling == "volcano" and shape.is_gpu


def _resources(shape: Shape, cluster: Cluster) -> Any:
    """Return requests and equal limits: the pod has the node to itself. Strings: the Kubernetes models refuse
    numbers."""
    from kubernetes.client import V1ResourceRequirements

    requests = {"cpu": str(shape.cpu), "memory": f"{shape.memory_gib}Gi"}
    if cluster.scratch_storage_class is None:
        requests["ephemeral-storage"] = f"{shape.disk_gib}Gi"
    if shape.is_gpu:
        requests["nvidia.com/gpu"] = str(shape.processes)
    if shape.network_devices:
        requests[shape.fabric.resource(cluster)] = str(shape.network_devices)
    return V1ResourceRequirements(requests=requests, limits=dict(requests))


def _variables(environment: Mapping[str, str]) -> list[Any]:
    from kubernetes.client import V1EnvVar

    return [V1EnvVar(name=name, value=value) for name, value in environment.items()]


def _of_pod(name: str, field: str) -> Any:
    """Return the variable with a field of the pod, which the kubelet sets."""
    from kubernetes.client import V1EnvVar, V1EnvVarSource, V1ObjectFieldSelector

    return V1EnvVar(name=name, value_from=V1EnvVarSource(field_ref=V1ObjectFieldSelector(field_path=field)))


def _environment(shape: Shape) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1"} if shape.is_gpu else {}
    debug = {"NCCL_DEBUG": "WARN"} if shape.is_gpu and shape.nodes > 1 else {}
    variables = {"TMPDIR": SCRATCH, "HF_HUB_CACHE": f"{SCRATCH}/hub", RETRIES: str(shape.retries)}
    return variables | offline | debug | shape.fabric.environment


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
    return [
        V1Toleration(key=key, operator="Exists") for key in keys + (cluster.spot_taints if shape.spot else [])
    ]


def _affinity(shape: Shape, cluster: Cluster) -> Any:
    """Return an affinity for one zone: required if the network does not cross zones, else preferred."""
    from kubernetes.client import (
        V1Affinity,
        V1LabelSelector,
        V1PodAffinity,
        V1PodAffinityTerm,
        V1WeightedPodAffinityTerm,
    )

    term = V1PodAffinityTerm(
        topology_key=cluster.zone_label,
        label_selector=V1LabelSelector(match_labels={_SHAPE_LABEL: shape.name}),
        # Only pods of the same job. Kubernetes older than 1.31 drops this; then it applies to all runs of the
        # row.
        match_label_keys=[_JOB_LABEL],
    )
    if not shape.fabric.has_devices:
        preferred = [V1WeightedPodAffinityTerm(weight=100, pod_affinity_term=term)]
        return V1Affinity(
            pod_affinity=V1PodAffinity(preferred_during_scheduling_ignored_during_execution=preferred)
        )
    return V1Affinity(pod_affinity=V1PodAffinity(required_during_scheduling_ignored_during_execution=[term]))


def job_labels(shape: Shape, cluster: Cluster) -> dict[str, str] | None:
    """Return the labels of the job object, where Kueue reads its queue; rows without GPUs are not queued."""
    return (
        {"kueue.x-k8s.io/queue-name": str(cluster.queue)}
        if cluster.gang_scheduling == "kueue" and shape.is_gpu
        else None
    )
