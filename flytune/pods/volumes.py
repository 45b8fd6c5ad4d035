"""Volumes of cluster.yaml as Kubernetes mounts them."""

from typing import Any

from flytune.hardware import Volume


def mount(volume: Volume) -> Any:
    """Return the container's mount of a volume."""
    from kubernetes.client import V1VolumeMount

    return V1VolumeMount(
        name=volume.name, mount_path=volume.mount_path, read_only=True if volume.read_only else None
    )


def source(volume: Volume) -> Any:
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
