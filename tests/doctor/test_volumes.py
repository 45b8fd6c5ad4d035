"""Tests of the doctor's checks of volumes."""

import pytest

from flytune.doctor import volumes
from flytune.doctor.volumes import Claim, ClusterVolumes
from flytune.hardware import Cluster, shape_named

TEAM = {"name": "team", "persistent_volume_claim": "team", "mount_path": "/mnt/team"}
BUCKET = {"name": "bucket", "csi": {"driver": "d.csi"}, "mount_path": "/mnt/bucket"}
SHAPES = (shape_named("cpu-1"), shape_named("h100-8x8"))


def finding(row, claim=None, drivers=None, shapes=SHAPES):
    storage = ClusterVolumes(claims={"team": claim} if claim is not None else {}, drivers=drivers or {})
    (found,) = volumes.findings(storage, "p-d", shapes, Cluster(volumes=[row]))
    assert found.do or found.level == "OK"
    return found


def bound(*modes, phase="Bound"):
    return Claim(phase=phase, access_modes=list(modes))


@pytest.mark.parametrize(
    ("row", "claim", "level", "told"),
    [
        (TEAM, bound("ReadWriteMany"), "OK", "claim team in p-d: bound, ReadWriteMany"),
        (TEAM, None, "FAIL", "no claim team in namespace p-d"),
        (TEAM, bound("ReadWriteMany", phase="Pending"), "WARN", "not bound to a volume yet"),
        (TEAM, bound("ReadWriteMany", phase="Lost"), "FAIL", "claim team is Lost"),
        (TEAM, bound("ReadWriteOnce"), "FAIL", "the pods of h100-8x8 mount it on several nodes at once"),
        (
            TEAM | {"shapes": ["cpu-1"]},
            bound("ReadWriteOnce"),
            "WARN",
            "a pod waits while one on another node has it",
        ),
        (TEAM | {"shapes": ["cpu-1"], "light_tasks": False}, bound("ReadWriteOnce"), "OK", "bound"),
        (TEAM, bound("ReadOnlyMany"), "FAIL", "has ReadOnlyMany, and pods write to it"),
        (TEAM | {"read_only": True}, bound("ReadOnlyMany"), "OK", "bound"),
        (TEAM | {"read_only": True}, bound("ReadWriteOncePod"), "FAIL", "on several nodes at once"),
    ],
)
def test_a_claim_is_compared_with_what_its_pods_need(row, claim, level, told):
    found = finding(row, claim)
    assert (found.level, told in found.said) == (level, True), found


def test_a_driver_must_exist_and_make_inline_volumes():
    assert finding(BUCKET, drivers={"d.csi": ["Persistent", "Ephemeral"]}).level == "OK"
    assert "no CSI driver d.csi; there are: e.csi" in finding(BUCKET, drivers={"e.csi": ["Ephemeral"]}).said
    found = finding(BUCKET, drivers={"d.csi": ["Persistent"]})
    assert (found.level, "makes no inline volumes" in found.said) == ("FAIL", True)


def test_what_kubernetes_cannot_show_is_called_not_checked():
    nfs = {"name": "models", "nfs": {"server": "10.0.0.2", "path": "/m"}, "mount_path": "/mnt/m"}
    for row, place in (
        (nfs, "10.0.0.2:/m"),
        ({"name": "d", "host_path": "/data", "mount_path": "/mnt/d"}, "/data of the nodes"),
    ):
        found = finding(row)
        assert found.level == "OK"
        assert found.said == f"{place}: Kubernetes has no object of it; not checked"


def test_volumes_of_other_shapes_are_left_out():
    row = TEAM | {"shapes": ["t4-8"], "light_tasks": False}
    assert list(volumes.findings(ClusterVolumes(), "p-d", SHAPES, Cluster(volumes=[row]))) == []
