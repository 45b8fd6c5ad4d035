"""Security of all pods: user, capabilities, system calls, a read-only root with its writable folders, no
token of Kubernetes.

What is set is `pod_security` of cluster.yaml; docs/pods.md explains each part.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from flytune.hardware import Cluster, Volume

PRIMARY = "primary"
"""Name of the container that runs the task."""
CODE = "/code"
"""Folder where fast registration unpacks code in pods with a read-only root."""
WRITABLE = {"flytune-code": CODE, "flytune-tmp": "/tmp"}
"""Folders that stay writable under a read-only root, by the names of their volumes; pods of shapes also have
/scratch."""


class Image(NamedTuple):
    """Facts about the image of a pod's container."""

    has_numeric_user: bool
    """True if it names its user by its number, which Kubernetes can check not to be root."""
    python_path: str
    """PYTHONPATH that it sets."""


def restrict(
    spec: Any, cluster: Cluster, mounted: list[Volume], image: Image, capabilities: Sequence[str] = ()
) -> Any:
    """Add what cluster.yaml's pod_security asks for to a pod spec of one container; return the spec.

    Args:
        mounted: the pod's volumes of cluster.yaml, whose groups it joins.
        capabilities: Linux capabilities that the container keeps.
    """
    from kubernetes.client import V1Capabilities, V1PodSecurityContext, V1SeccompProfile, V1SecurityContext

    rules, (container,) = cluster.pod_security, spec.containers
    # ImageSpec's images have a user without a number, which Kubernetes can neither check nor replace: it owns
    # their packages.
    user = rules.user if image.has_numeric_user else None
    groups = sorted({volume.group for volume in mounted if volume.group is not None})
    spec.security_context = V1PodSecurityContext(
        run_as_user=user,
        run_as_group=user,
        run_as_non_root=True if rules.restricted and image.has_numeric_user else None,
        seccomp_profile=V1SeccompProfile(type="RuntimeDefault") if rules.restricted else None,
        # Volumes belong to root, the images' user does not. OnRootMismatch: a volume whose folder has this
        # group already is not walked through, which takes minutes for many files.
        fs_group=rules.user,
        fs_group_change_policy="OnRootMismatch" if rules.user is not None else None,
        supplemental_groups=groups or None,
    )
    if not rules.service_account_token:
        spec.automount_service_account_token = False
    added = list(capabilities) or None
    if rules.restricted:
        container.security_context = V1SecurityContext(
            allow_privilege_escalation=False, capabilities=V1Capabilities(drop=["ALL"], add=added)
        )
    elif added:
        container.security_context = V1SecurityContext(capabilities=V1Capabilities(add=added))
    if rules.read_only_root:
        _make_root_read_only(spec, container, image)
    return spec


def _make_root_read_only(spec: Any, container: Any, image: Image) -> None:
    """Mount empty folders at WRITABLE; run in, and import from, the folder where fast registration unpacks
    code."""
    from kubernetes.client import V1EmptyDirVolumeSource, V1EnvVar, V1SecurityContext, V1Volume, V1VolumeMount

    container.security_context = container.security_context or V1SecurityContext()
    container.security_context.read_only_root_filesystem = True
    spec.volumes = [
        *(spec.volumes or []),
        *(V1Volume(name=name, empty_dir=V1EmptyDirVolumeSource()) for name in WRITABLE),
    ]
    container.volume_mounts = [
        # First: volumes of cluster.yaml may be mounted below /tmp.
        *(V1VolumeMount(name=name, mount_path=path) for name, path in WRITABLE.items()),
        *(container.volume_mounts or []),
    ]
    container.working_dir = CODE
    # pyflyte-fast-execute appends the folder to PYTHONPATH, where the image's own code would be found first.
    path = V1EnvVar(name="PYTHONPATH", value=f"{CODE}:{image.python_path}")
    container.env = [*(container.env or []), path]
