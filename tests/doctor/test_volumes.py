"""Tests of the doctor's checks of volumes, with Kubernetes' real client and a stand-in for its API."""

import pytest

from flytune.doctor import volumes
from flytune.doctor.volumes import Claim, Storage
from flytune.hardware import Cluster, shape_named
from tests.doctor.test_doctor import CRDS_PATH, NODES, NODES_PATH, definitions, kubernetes

TEAM = {"name": "team", "persistent_volume_claim": "team", "mount_path": "/mnt/team"}
BUCKET = {"name": "bucket", "csi": {"driver": "d.csi"}, "mount_path": "/mnt/bucket"}
SHAPES = (shape_named("cpu-1"), shape_named("h100-8x8"))


def finding(row, claim=None, drivers=None, shapes=SHAPES):
    storage = Storage(claims={"team": claim} if claim is not None else {}, drivers=drivers or {})
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
        (TEAM | {"shapes": ["cpu-1"]}, bound("ReadWriteOnce"), "WARN", "a pod waits while one on another node has it"),
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
    assert list(volumes.findings(Storage(), "p-d", SHAPES, Cluster(volumes=[row]))) == []


def test_claims_and_drivers_through_the_real_client(tmp_path, monkeypatch):
    claim = {"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound", "accessModes": ["ReadWriteOnce"]}}
    drivers = {"items": [{"metadata": {"name": "d.csi"}, "spec": {"volumeLifecycleModes": ["Ephemeral"]}}]}
    answers = {
        NODES_PATH: NODES,
        CRDS_PATH: definitions(),
        "/api/v1/namespaces/p-d/persistentvolumeclaims/team": claim,
        "/api/v1/namespaces/p-d/persistentvolumeclaims/hidden": 403,
        "/api/v1/namespaces/p-d/persistentvolumeclaims/gone": 404,
        "/apis/storage.k8s.io/v1/csidrivers": drivers,
    }
    rows = [TEAM, BUCKET]
    rows += [{"name": name, "persistent_volume_claim": name, "mount_path": f"/mnt/{name}"} for name in ("hidden", "gone")]
    found = {one.what: one for one in kubernetes(tmp_path, monkeypatch, answers, volumes=rows)}
    assert found["volume team"].level == "FAIL", "the volume's own modes count, not those asked for"
    assert "claim team has ReadWriteOnce" in found["volume team"].said
    assert found["volume bucket"].level == "OK"
    assert (found["volume hidden"].level, "cannot be read" in found["volume hidden"].said) == ("WARN", True)
    assert "no claim gone in namespace p-d" in found["volume gone"].said
