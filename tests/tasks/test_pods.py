"""Tests of pod templates of sample shapes on sample clusters, and of requested secrets."""

import os
import subprocess
import sys
from collections import OrderedDict

import pytest
from flytekit import task
from flytekit.tools.translator import get_serializable
from google.protobuf.json_format import MessageToDict
from kubernetes.client import ApiClient

from flytune.errors import RecipeError
from flytune.hardware import Cluster, shape_named
from flytune.pods import spec
from flytune.sharding.zero import Zero3
from flytune.stages import ranks
from flytune.training.stopping import GRACE_SECONDS
from tasks.runtime import pods, secrets
from tests.support.paths import ROOT
from tests.support.plans import recipe_of
from tests.support.registration import SETTINGS


def shape_of(**changes):
    return shape_named("h100-8").model_copy(update=changes)


def pod_of(shape, **cluster):
    template = pods.pod_template(shape, Cluster(**cluster))
    return ApiClient().sanitize_for_serialization(template.pod_spec), template


def environment(pod):
    return {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}


def tolerated(pod):
    assert {toleration["operator"] for toleration in pod["tolerations"]} <= {"Exists"}
    return [toleration["key"] for toleration in pod["tolerations"]]


def small() -> int:
    return 1


def test_a_pod_s_temporary_files_are_on_the_scratch_disk():
    pod, _ = pod_of(shape_of())
    # The kubelet sets the names of node and namespace.
    code = {
        "PYTHONPATH": "/code:/app:/opt/site",
        "FLYTUNE_RETRIES": "3",
        "FLYTUNE_NODE": None,
        "FLYTUNE_NAMESPACE": None,
    }
    assert (
        environment(pod)
        == {"TMPDIR": "/scratch", "HF_HUB_CACHE": "/scratch/hub", "HF_HUB_OFFLINE": "1"} | code
    )
    laptop, _ = pod_of(shape_named("cpu-2"))
    assert "HF_HUB_OFFLINE" not in environment(laptop)
    assert tolerated(laptop) == []


def test_flytekit_and_the_nvme_offload_follow_tmpdir(tmp_path):
    code = (
        "from flytekit import FlyteContextManager as f; from flytekit.bin.entrypoint import setup_execution\n"
        "with setup_execution('/nowhere/raw') as context:\n"
        "    print(context.file_access.local_sandbox_dir, context.user_space_params.working_directory)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    sandbox, working = done.stdout.split()
    assert sandbox.startswith(str(tmp_path))
    assert working.startswith(str(tmp_path))


def test_the_nvme_offload_is_in_the_temporary_folder_of_the_run(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/scratch")
    config = Zero3(recipe_of(sharding={"name": "zero3", "offload": "nvme"})).config()["zero_optimization"]
    assert (
        config["offload_param"]["nvme_path"]
        == config["offload_optimizer"]["nvme_path"]
        == "/scratch/flytune-nvme"
    )
    on_cpu = Zero3(recipe_of(sharding={"name": "zero3", "offload": "cpu"})).config()
    assert "nvme_path" not in str(on_cpu)


def test_the_grace_period_includes_torchelastic_s_and_the_parent_s_report():
    assert pod_of(shape_of())[0]["terminationGracePeriodSeconds"] >= GRACE_SECONDS + 20


def test_scratch_may_be_a_separate_volume():
    pod, _ = pod_of(shape_of(disk_gib=300), scratch_storage_class="local-nvme")
    (scratch,) = [volume for volume in pod["volumes"] if volume["name"] == "scratch"]
    assert scratch["ephemeral"]["volumeClaimTemplate"]["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local-nvme",
        "resources": {"requests": {"storage": "300Gi"}},
    }
    assert "ephemeral-storage" not in pod["containers"][0]["resources"]["requests"]


def test_only_spot_rows_tolerate_spot_and_are_interruptible():
    taints = {"spot_taints": ["cloud.google.com/gke-spot", "karpenter.sh/capacity-type"]}
    assert tolerated(pod_of(shape_of(), **taints)[0]) == ["nvidia.com/gpu"]
    assert tolerated(pod_of(shape_of(spot=True), **taints)[0]) == ["nvidia.com/gpu", *taints["spot_taints"]]
    labels = {"karpenter.sh/capacity-type": "spot"}
    assert pod_of(shape_of(node_labels=labels))[0]["nodeSelector"] == labels
    assert "nodeSelector" not in pod_of(shape_of())[0]


def test_affinity_to_one_zone_is_required_if_the_network_does_not_cross_zones():
    assert "affinity" not in pod_of(shape_of())[0]
    pod, template = pod_of(shape_of(nodes=2), zone_label="a/zone")
    (preferred,) = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    term = {
        "topologyKey": "a/zone",
        "labelSelector": {"matchLabels": {"flytune-shape": "h100-8"}},
        "matchLabelKeys": ["training.kubeflow.org/job-name"],
    }
    assert preferred == {"weight": 100, "podAffinityTerm": term}
    assert template.labels == {"flytune-shape": "h100-8"}
    for network in ("efa", "infiniband"):
        pod, _ = pod_of(shape_of(nodes=2, network=network, network_devices=1), zone_label="a/zone")
        assert pod["affinity"]["podAffinity"] == {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def test_efa():
    pod, _ = pod_of(shape_of(nodes=2, network="efa", network_devices=32))
    container = pod["containers"][0]
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == "32"
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert (
        environment(pod).items()
        >= {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0", "NCCL_DEBUG": "WARN"}.items()
    )
    assert "add" not in container["securityContext"]["capabilities"]


def test_infiniband():
    pod, _ = pod_of(
        shape_of(nodes=2, network="infiniband", network_devices=8), infiniband_resource="rdma/hca"
    )
    container = pod["containers"][0]
    assert container["resources"]["limits"]["rdma/hca"] == "8"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert environment(pod)["NCCL_NET"] == "IB"


def test_gang_scheduling():
    kueue = Cluster(gang_scheduling="kueue", queue="gpus")
    assert spec.job_labels(shape_of(), kueue) == {"kueue.x-k8s.io/queue-name": "gpus"}
    assert spec.job_labels(shape_named("cpu-1"), kueue) is None
    assert spec.job_labels(shape_of(), Cluster(gang_scheduling="volcano", queue="gpus")) is None
    for ours in ({}, {"gang_scheduling": "coscheduling"}, {"gang_scheduling": "kueue", "queue": "gpus"}):
        pod, template = pod_of(shape_of(nodes=2), **ours)
        assert "schedulerName" not in pod
        assert template.annotations is None
    pod, template = pod_of(shape_of(nodes=2), gang_scheduling="volcano", queue="gpus")
    assert pod["schedulerName"] == "volcano"
    assert template.annotations == {"scheduling.volcano.sh/queue-name": "gpus"}
    assert pod_of(shape_of(), gang_scheduling="volcano")[1].annotations is None
    assert "schedulerName" not in pod_of(shape_named("cpu-1"), gang_scheduling="volcano")[0]


def test_rendezvous_waits_as_long_as_nodes_may_take_to_start():
    assert ranks.rendezvous_seconds(Cluster(node_start_minutes=7.5)) == {
        "timeout": 450,
        "join_timeout": 450,
        "read_timeout": 450,
    }


def declared(monkeypatch, cluster, shape, **arguments):
    """Return the registered template of a task that is declared on that cluster."""
    monkeypatch.setattr(pods, "load_cluster", lambda: cluster)
    entity = task(**pods.on_shape(shape) | {"container_image": "i:t"} | arguments)(small)
    return get_serializable(OrderedDict(), SETTINGS, entity).template.to_flyte_idl()


def test_the_pod_template_is_registered(monkeypatch):
    cluster = Cluster(
        gang_scheduling="kueue", queue="gpus", scratch_storage_class="local", spot_taints=["spot"]
    )
    shape = shape_of(nodes=2, network="efa", network_devices=32, spot=True, node_labels={"pool": "p5"})
    template = declared(monkeypatch, cluster, shape)
    pod = MessageToDict(template.k8s_pod.pod_spec)
    expected = ApiClient().sanitize_for_serialization(pods.pod_template(shape, cluster).pod_spec)
    container, wanted = pod.pop("containers")[0], expected.pop("containers")[0]
    assert pod == expected
    assert wanted.items() <= container.items()
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == "32"
    assert template.metadata.interruptible is True
    assert dict(template.metadata.metadata.labels) == {"kueue.x-k8s.io/queue-name": "gpus"}
    assert dict(template.k8s_pod.metadata.labels) == {"flytune-shape": "h100-8"}


def test_secrets_are_requested_by_name(monkeypatch):
    names = {"tracking": [{"env_var": "WANDB_API_KEY", "group": "flytune", "key": "wandb"}]}
    monkeypatch.setattr(secrets, "load_cluster", lambda: Cluster(secrets=names))
    assert secrets.secrets("hub") == []
    template = declared(monkeypatch, Cluster(), shape_of(), secret_requests=secrets.secrets("tracking"))
    (asked,) = template.security_context.secrets
    assert (asked.group, asked.key, asked.env_var) == ("flytune", "wandb", "WANDB_API_KEY")
    assert asked.mount_requirement == 1  # flyteidl.core.Secret.ENV_VAR


def test_a_secret_that_is_not_set_locally_is_absent(monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(
        secrets,
        "load_cluster",
        lambda: Cluster(secrets={"hub": [{"env_var": "HF_TOKEN", "group": "g", "key": "k"}]}),
    )

    @task(secret_requests=secrets.secrets("hub"))
    def token() -> str:
        return os.environ.get("HF_TOKEN", "none")

    assert token() == "none"


def test_a_secret_without_a_group_is_refused(monkeypatch):
    monkeypatch.setattr(
        secrets, "load_cluster", lambda: Cluster(secrets={"hub": [{"env_var": "HF_TOKEN", "key": "k"}]})
    )
    with pytest.raises(
        RecipeError, match=r"cluster.yaml: secrets.hub\[0\]: Group is a required parameter; give group"
    ):
        secrets.secrets("hub")


def test_small_tasks_read_secrets_without_kubernetes_or_torch():
    code = (
        "import sys, tasks.plan, tasks.prepare, tasks.store; print([m for m in ('kubernetes', 'torch') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"
