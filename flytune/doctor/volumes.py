"""Checks of the claims and drivers in Kubernetes that the volumes of cluster.yaml require."""

from collections.abc import Iterator, Mapping, Sequence

from pydantic import Field

from flytune.doctor.finding import Finding, fail, ok, warn
from flytune.hardware import Cluster, Shape, Volume
from flytune.schema import Strict


class Claim(Strict):
    """A persistent volume claim."""

    phase: str
    """Bound, Pending or Lost."""
    access_modes: list[str]
    """ReadWriteOnce, ReadOnlyMany, ReadWriteMany ...: those of its volume if it is bound, else those that it
    asks for."""


class ClusterVolumes(Strict):
    """Facts about a cluster's claims and drivers."""

    claims: dict[str, Claim | None] = Field(default={})
    """Existing claims that cluster.yaml names, by name; None if access is denied."""
    drivers: dict[str, list[str]] | None = Field(default={})
    """Lifecycle modes of the CSI drivers, by name; None if access is denied."""


def findings(
    there: ClusterVolumes, namespace: str, shapes: Sequence[Shape], cluster: Cluster
) -> Iterator[Finding]:
    """Check each volume of cluster.yaml that the pods of these shapes, or of the light tasks, mount."""
    for volume in cluster.volumes:
        mounting = [shape for shape in shapes if volume.is_mounted_by(shape.name)]
        if not mounting and not volume.light_tasks:
            continue
        if volume.persistent_volume_claim is not None:
            yield _claim(volume, volume.persistent_volume_claim, there.claims, namespace, mounting)
        elif volume.csi is not None:
            yield _driver(volume, volume.csi.driver, there.drivers)
        else:
            place = (
                f"{volume.nfs.server}:{volume.nfs.path}" if volume.nfs else f"{volume.host_path} of the nodes"
            )
            yield ok(f"volume {volume.name}", f"{place}: Kubernetes has no object of it; not checked")


def _claim(
    volume: Volume, name: str, claims: Mapping[str, Claim | None], namespace: str, mounting: Sequence[Shape]
) -> Finding:
    what = f"volume {volume.name}"
    if name not in claims:
        do = f"create it (`kubectl get pvc -n {namespace}` lists those there are), or correct cluster.yaml"
        return fail(what, f"no claim {name} in namespace {namespace}: pods would stay Pending", do)
    if (claim := claims[name]) is None:
        return warn(what, f"claim {name} cannot be read with this kubeconfig", "ask someone who has access")
    modes = ", ".join(claim.access_modes)
    if claim.phase not in ("Bound", "Pending"):
        return fail(what, f"claim {name} is {claim.phase}", f"`kubectl describe pvc {name} -n {namespace}`")
    if not volume.read_only and not any(mode.startswith("ReadWrite") for mode in claim.access_modes):
        return fail(
            what,
            f"claim {name} has {modes}, and pods write to it",
            "use another claim, or set read_only: true",
        )
    many = {"ReadWriteMany", *({"ReadOnlyMany"} if volume.read_only else ())}
    if not many & set(claim.access_modes):
        do = f"use a claim with {' or '.join(sorted(many, reverse=True))}"
        if several := [shape.name for shape in mounting if shape.nodes > 1]:
            problem = (
                f"claim {name} has {modes}, and the pods of {', '.join(several)} mount it on several "
                "nodes at once"
            )
            return fail(what, problem, f"{do}, or name the other rows in the volume's shapes")
        if volume.light_tasks or len(mounting) > 1:
            problem = f"claim {name} has {modes}: a pod waits while one on another node has it"
            return warn(what, problem, f"{do}, if several runs are to be possible at a time")
    if claim.phase == "Pending":
        do = f"`kubectl describe pvc {name} -n {namespace}`; none is needed if it says WaitForFirstConsumer"
        return warn(what, f"claim {name} is not bound to a volume yet", do)
    return ok(what, f"claim {name} in {namespace}: bound, {modes}")


def _driver(volume: Volume, driver: str, drivers: Mapping[str, Sequence[str]] | None) -> Finding:
    what = f"volume {volume.name}"
    if drivers is None:
        return warn(what, "CSI drivers cannot be listed with this kubeconfig", "ask someone who has access")
    if driver not in drivers:
        there = ", ".join(sorted(drivers)) or "none"
        return fail(
            what, f"no CSI driver {driver}; there are: {there}", "install it, or correct cluster.yaml"
        )
    if "Ephemeral" not in drivers[driver]:
        do = "make a claim, and write persistent_volume_claim in cluster.yaml in place of csi"
        return fail(
            what, f"CSI driver {driver} makes no inline volumes (its lifecycle modes lack Ephemeral)", do
        )
    return ok(what, f"CSI driver {driver} is installed")
