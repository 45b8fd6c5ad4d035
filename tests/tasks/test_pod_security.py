"""Tests of the security of pods: what every registered task denies, and how cluster.yaml relaxes it."""

import importlib
import pkgutil
import subprocess
import sys
from collections import OrderedDict

import pytest
from flytekit.models.task import TaskSpec
from flytekit.tools.translator import get_serializable
from google.protobuf.json_format import MessageToDict
from kubernetes.client import ApiClient

import images
import workflows
from flytune.errors import RecipeError
from flytune.hardware import Cluster, load_cluster, shape_named
from flytune.hardware.volumes import Volume
from flytune.pods import security
from tasks.runtime import pods
from tests.support.paths import ROOT
from tests.support.registration import SETTINGS

NAMES = [module.name for module in pkgutil.iter_modules(workflows.__path__)]


def spec_of(template):
    return ApiClient().sanitize_for_serialization(template.pod_spec)


def light(monkeypatch, **cluster):
    monkeypatch.setattr(pods, "load_cluster", lambda: Cluster(**cluster))
    return spec_of(pods.light_pod())


@pytest.fixture(scope="module")
def registered():
    """Return the pods of all tasks of all workflows, by name, as they are registered."""
    found = {}
    for name in NAMES:
        entities = OrderedDict()
        for workflow in vars(importlib.import_module(f"workflows.{name}")).values():
            if type(workflow).__name__ == "PythonFunctionWorkflow":
                get_serializable(entities, SETTINGS, workflow)
        made = [
            entity.to_flyte_idl().template for entity in entities.values() if isinstance(entity, TaskSpec)
        ]
        found |= {task.id.name: MessageToDict(task.k8s_pod.pod_spec) for task in made}
    assert len(found) > 60
    return found


def test_every_registered_pod_is_restricted(registered):
    """The fields of Kubernetes' policy `restricted` (Pod Security Standards), a read-only root, and no
    token."""
    for name, pod in registered.items():
        assert pod["automountServiceAccountToken"] is False, name
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (10001, 10001, 10001), (
            name
        )
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"], name
        assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
        assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(pod), name


def test_every_registered_pod_can_write_where_flytekit_and_libraries_do(registered):
    for name, pod in registered.items():
        (container,) = pod["containers"]
        kinds = {volume["name"]: volume for volume in pod["volumes"]}
        writable = {
            mount["mountPath"] for mount in container["volumeMounts"] if "emptyDir" in kinds[mount["name"]]
        }
        assert {"/tmp", "/code"} <= writable, name
        assert container["workingDir"] == "/code", name
        variables = {one["name"]: one.get("value") for one in container["env"]}
        assert variables["PYTHONPATH"].split(":")[0] == "/code", name
        # Python's tempfile, which flytekit uses too, takes TMPDIR, else /tmp.
        assert variables.get("TMPDIR", "/tmp") in writable, name


def test_the_default_user_and_paths_are_those_of_the_images():
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"--uid {Cluster().pod_security.user} " in dockerfile
    assert f"PYTHONPATH={images.PYTHONPATH} " in dockerfile
    assert f"WORKDIR {images.PYTHONPATH.split(':')[0]}\n" in dockerfile


@pytest.mark.parametrize(
    ("relaxed", "gone", "left"),
    [
        (
            {"read_only_root": False},
            {"readOnlyRootFilesystem", "workingDir", "flytune-code", "PYTHONPATH"},
            {"runAsNonRoot"},
        ),
        (
            {"restricted": False},
            {"runAsNonRoot", "seccompProfile", "allowPrivilegeEscalation", "capabilities"},
            {"readOnlyRootFilesystem", "runAsUser"},
        ),
        ({"service_account_token": True}, {"automountServiceAccountToken"}, {"runAsNonRoot"}),
        ({"user": None}, {"runAsUser", "runAsGroup", "fsGroup"}, {"runAsNonRoot", "readOnlyRootFilesystem"}),
    ],
)
def test_a_cluster_relaxes_a_part(monkeypatch, relaxed, gone, left):
    for cluster, found in (({}, gone | left), ({"pod_security": relaxed}, left)):
        for pod in (
            light(monkeypatch, **cluster),
            spec_of(pods.pod_template(shape_named("h100-8"), Cluster(**cluster))),
        ):
            text = str(pod)
            assert [word for word in gone | left if word in text] == [
                word for word in gone | left if word in found
            ]


def test_all_parts_can_be_relaxed_at_once(monkeypatch):
    relaxed = {"read_only_root": False, "restricted": False, "service_account_token": True, "user": None}
    pod = light(monkeypatch, pod_security=relaxed)
    del pod["containers"][0]["env"]
    assert pod == {"containers": [{"name": "primary"}], "securityContext": {}}


def test_another_user_owns_the_volumes_too(monkeypatch):
    context = light(monkeypatch, pod_security={"user": 2000})["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (2000, 2000, 2000)


def test_pinned_memory_keeps_its_one_capability():
    shape = shape_named("h100-8").model_copy(
        update={"network": "infiniband", "nodes": 2, "network_devices": 1}
    )
    for rules, expected in (
        ({}, {"add": ["IPC_LOCK"], "drop": ["ALL"]}),
        ({"restricted": False}, {"add": ["IPC_LOCK"]}),
    ):
        (container,) = spec_of(pods.pod_template(shape, Cluster(pod_security=rules)))["containers"]
        assert container["securityContext"]["capabilities"] == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "pod_security: {read_only_rot: true}",
            "pod_security.read_only_rot: unknown key; did you mean read_only_root?",
        ),
        ("pod_security: {user: 0}", "pod_security.user: must be 1 or greater"),
        ("pod_security: {restricted: strong}", "pod_security.restricted: must be true or false"),
    ],
)
def test_mistakes_are_refused(tmp_path, text, told):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=told):
        load_cluster(file)


@pytest.mark.parametrize("path", ["/code", "/code/mine", "/tmp"])
def test_no_volume_hides_a_writable_folder(path):
    with pytest.raises(ValueError, match="it would hide files that pods need there"):
        Volume(name="a", persistent_volume_claim="a", mount_path=path)
    for name in security.WRITABLE:
        with pytest.raises(ValueError, match="pods have a volume of this name"):
            Volume(name=name, persistent_volume_claim="a", mount_path="/mnt/a")


@pytest.mark.parametrize(("with_torch", "image"), [(True, "flytune-train:dev"), (False, "flytune-light:dev")])
def test_plans_are_made_in_the_training_image_where_cluster_yaml_says_so(with_torch, image):
    code = (
        "from flytune import hardware\n"
        f"found = hardware.load_cluster().model_copy(update={{'plan_in_training_image': {with_torch}}})\n"
        "hardware.load_cluster = lambda: found\n"
        "import tasks.plan, tasks.sweep\n"
        "print(tasks.plan.make_plan.container_image, tasks.sweep.draw_points.container_image)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, env={"PATH": ""}
    )
    assert done.stdout.splitlines()[-1].split() == [image, image]


def test_imagespec_s_user_has_no_number_to_check():
    """flytekit's builder ends with `USER flytekit`, whose packages below /root no other user can read."""
    code = (
        "import json, warnings; warnings.simplefilter('ignore')\n"
        "from kubernetes.client import ApiClient; from tasks.runtime import pods\n"
        "print(json.dumps(ApiClient().sanitize_for_serialization(pods.light_pod().pod_spec)))"
    )
    environment = {"FLYTUNE_IMAGES": "imagespec", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    )
    assert not [word for word in ("runAsUser", "runAsNonRoot") if word in done.stdout]
    assert '"value": "/code:/root"' in done.stdout
    assert '"allowPrivilegeEscalation": false' in done.stdout
