"""Tests of volumes in the pod templates of shapes and of the light tasks."""

import importlib
import pkgutil

from flytekit import PythonFunctionTask, Resources, task
from google.protobuf.json_format import MessageToDict
from kubernetes.client import ApiClient

import tasks
from flytune.hardware import Cluster, shape_named
from flytune.pods import security
from images import LIGHT
from tasks.runtime import pods
from tests.support.registration import proto

ROWS = [
    {"name": "team", "persistent_volume_claim": "team-claim", "mount_path": "/mnt/team"},
    {
        "name": "models",
        "nfs": {"server": "10.0.0.2", "path": "/m"},
        "mount_path": "/mnt/models",
        "read_only": True,
        "group": 7,
    },
    {
        "name": "disk",
        "host_path": "/data",
        "mount_path": "/mnt/disk",
        "shapes": ["h100-8"],
        "light_tasks": False,
    },
    {
        "name": "bucket",
        "csi": {"driver": "d", "volume_attributes": {"a": "b"}, "node_publish_secret": "s", "fs_type": "f"},
        "mount_path": "/mnt/b",
        "light_tasks": False,
    },
]
SOURCES = {
    "team": {"persistentVolumeClaim": {"claimName": "team-claim"}},
    "models": {"nfs": {"server": "10.0.0.2", "path": "/m", "readOnly": True}},
    "disk": {"hostPath": {"path": "/data", "type": "Directory"}},
    "bucket": {
        "csi": {
            "driver": "d",
            "fsType": "f",
            "volumeAttributes": {"a": "b"},
            "nodePublishSecretRef": {"name": "s"},
        },
    },
}


def small() -> int:
    return 1


def mounted(pod):
    """Return the pod's own volumes by name, and the mounts of its container."""
    found = {volume.pop("name"): volume for volume in pod["volumes"]}
    for name in ("dshm", "scratch", *security.WRITABLE):
        found.pop(name, None)
    mounts = {mount.pop("name"): mount for mount in pod["containers"][0]["volumeMounts"]}
    assert set(found) <= set(mounts)
    return found, {name: mounts[name] for name in found}


def test_a_shape_s_pods_mount_its_volumes():
    def pod(shape):
        spec = pods.pod_template(shape_named(shape), Cluster(volumes=ROWS)).pod_spec
        return ApiClient().sanitize_for_serialization(spec)

    spec = pod("h100-8")
    assert spec["securityContext"]["supplementalGroups"] == [7]
    found, mounts = mounted(spec)
    assert found == SOURCES
    assert mounts == {
        "team": {"mountPath": "/mnt/team"},
        "models": {"mountPath": "/mnt/models", "readOnly": True},
        "disk": {"mountPath": "/mnt/disk"},
        "bucket": {"mountPath": "/mnt/b"},
    }
    assert set(mounted(pod("h100-8x8"))[0]) == {"team", "models", "bucket"}
    # The evaluation's pod is one node of the same row.
    one = pods.pod_template(shape_named("h100-8").one_node, Cluster(volumes=ROWS)).pod_spec
    assert "disk" in {volume.name for volume in one.volumes}


def test_light_tasks_mount_their_volumes(monkeypatch):
    monkeypatch.setattr(pods, "load_cluster", lambda: Cluster(volumes=ROWS))
    template = pods.light_pod()
    assert template is not pods.light_pod(), "plugins modify templates"
    spec = ApiClient().sanitize_for_serialization(template.pod_spec)
    found, mounts = mounted(spec)
    assert found == {name: SOURCES[name] for name in ("team", "models")}
    assert set(mounts) == {"team", "models"}
    assert spec["securityContext"]["fsGroup"] == 10001


def test_every_light_task_is_registered_with_the_volumes(monkeypatch):
    monkeypatch.setattr(pods, "load_cluster", lambda: Cluster(volumes=ROWS))
    names = [f"tasks.{module.name}" for module in pkgutil.iter_modules(tasks.__path__) if not module.ispkg]
    found = {}
    for name in names:
        module = importlib.import_module(name)
        found |= {
            value.name: value
            for value in vars(module).values()
            if isinstance(value, PythonFunctionTask) and value.container_image is LIGHT
        }
    assert len(found) > 12
    for name, made in found.items():
        # A new spec: other tests have made the template's own.
        spec = ApiClient().sanitize_for_serialization(made.pod_template._make())
        assert set(mounted(spec)[0]) == {"team", "models"}, name


def test_a_light_task_keeps_its_resources_and_command(monkeypatch):
    monkeypatch.setattr(pods, "load_cluster", lambda: Cluster(volumes=ROWS))
    declared = task(
        container_image="i:t", requests=Resources(cpu="2", mem="8Gi"), pod_template=pods.light_pod()
    )(small)
    template = proto(declared)
    pod = MessageToDict(template.k8s_pod.pod_spec)
    container = pod["containers"][0]
    assert container["resources"]["requests"] == {"cpu": "2", "memory": "8Gi"}
    assert container["args"][0] == "pyflyte-execute"
    assert template.config["primary_container_name"] == container["name"]
    assert set(mounted(pod)[0]) == {"team", "models"}
