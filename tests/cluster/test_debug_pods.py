"""Pods to look into: through Kubernetes' real client from a stand-in, and their program with a real stage."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest
import yaml

from flytune.cli import main
from flytune.cluster import debug_pods, debug_program
from flytune.recipe import Recipe
from tests.chaos.pods import SETTINGS, fill_command, write_inputs
from tests.support.mock_cluster import http
from tests.support.paths import ROOT
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

PODS = "/api/v1/namespaces/flytesnacks-development/pods"
STAGE = [
    "pyflyte-execute",
    "--inputs",
    "s3://b/inputs.pb",
    "--output-prefix",
    "s3://b/0",
    "--resolver",
    "r",
    "--",
]
FAST = [
    "pyflyte-fast-execute",
    "--additional-distribution",
    "s3://b/code.tgz",
    "--dest-dir",
    ".",
    "--",
    *STAGE,
]


def pod(name, phase, task, index=None, made="2026-11-28T06:00:00Z"):
    labels = (
        {"task-name": task} if index is None else {debug_pods._JOB: "abc-n3-0", debug_pods._INDEX: str(index)}
    )
    container = {
        "name": "primary",
        "image": "ghcr.io/someone/flytune-train:abc",
        "args": [*FAST, "task-module", "tasks.train", "task-name", "train_l4_2"],
        "env": [{"name": "PET_RDZV_ENDPOINT", "value": "abc-n3-0-worker-0:23456"}]
        if index is not None
        else [],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        "livenessProbe": {"exec": {"command": ["true"]}},
    }
    spec = {
        "nodeName": "n1",
        "containers": [{"name": "sidecar", "image": "other"}, container],
        "initContainers": [{"name": "init-pytorch", "image": "alpine"}],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    }
    meta = {
        "name": name,
        "labels": labels,
        "creationTimestamp": made,
        "ownerReferences": [{"kind": "PyTorchJob"} | OWNER],
    }
    return {"metadata": meta, "spec": spec, "status": {"phase": phase}}


OWNER = {"apiVersion": "kubeflow.org/v1", "name": "abc-n3-0", "uid": "u"}
THERE = [
    pod("abc-n1-0", "Succeeded", "tasks-prepare-prepare-data", made="2026-11-28T05:00:00Z"),
    pod("abc-n3-0-worker-1", "Failed", "", 1),
    pod("abc-n3-0-worker-0", "Failed", "", 0),
    pod("abc-n4-0", "Running", "tasks-report-report", made="2026-11-28T07:00:00Z"),
    pod("other-n0-0", "Failed", "tasks-train-train-cpu-1"),
]
LOG = f"inputs of the stage: /tmp/flytune-debug/inputs\nprocess 1: {debug_program.READY}\n"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Yield requests that a stand-in for Kubernetes has got."""
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = []

    def made(body):
        return body | {"metadata": {"name": f"{body['metadata']['generateName']}{len(asked)}"}}

    answers = {
        PODS: {"items": THERE, "metadata": {}},
        f"POST {PODS}": made,
        "/apis/kubeflow.org/v1/namespaces/flytesnacks-development/pytorchjobs": {
            "items": [{"metadata": {"name": "abc-n3-0"}}]
        },
    }
    for number, rank in ((1, 0), (2, 1)):
        name = f"{PODS}/abc-n3-0-worker-{rank}-debug-{number}"
        answers[f"{name}/status"] = {
            "metadata": {},
            "status": {"phase": "Running", "podIP": f"10.0.0.{rank}"},
        }
        answers[f"{name}/log"] = LOG
    with http(answers, asked=asked) as address:
        file = tmp_path / "kubeconfig"
        user, context = (
            {"name": "u", "user": {"token": "t"}},
            {"name": "c", "context": {"cluster": "c", "user": "u"}},
        )
        known = {
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "users": [user],
            "contexts": [context],
        }
        file.write_text(
            yaml.safe_dump(known | {"apiVersion": "v1", "kind": "Config", "current-context": "c"})
        )
        monkeypatch.setenv("KUBECONFIG", str(file))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
        yield asked


def test_each_pod_of_the_stage_that_failed_is_copied_and_starts_nothing(cluster, capsys):
    assert main(["debug", "abc", "--hours", "1"]) == 0, capsys.readouterr().err
    first, second = (body for method, body in cluster if method == "POST")
    assert first["metadata"] == {
        "generateName": "abc-n3-0-worker-0-debug-",
        "labels": {"flytune-debug": "abc"},
    }
    assert {key: first["spec"][key] for key in ("activeDeadlineSeconds", "restartPolicy")} == {
        "activeDeadlineSeconds": 3600,
        "restartPolicy": "Never",
    }
    assert first["spec"].keys() & {"nodeName", "initContainers"} == set()
    (container,) = first["spec"]["containers"]
    (original,) = [one for one in THERE[2]["spec"]["containers"] if one["name"] == "primary"]
    for field in ("image", "resources", "securityContext", "volumeMounts"):
        assert container[field] == original[field]
    program = ["python", "-m", "flytune.cluster.debug_program", "3600", "--"]
    assert container["args"][: len(FAST) - len(STAGE)] == FAST[: len(FAST) - len(STAGE)], (
        "the code is unpacked first"
    )
    assert container["args"][len(FAST) - len(STAGE) :][: len(program) + 1] == [*program, "pyflyte-execute"]
    meetings = [
        {one["name"]: one.get("value") for one in body["spec"]["containers"][0]["env"]}["PET_RDZV_ENDPOINT"]
        for body in (first, second)
    ]
    assert meetings == ["$(FLYTUNE_DEBUG_ADDRESS):23456", "10.0.0.0:23456"]
    said = capsys.readouterr().out
    for line in (
        "as abc-n3-0-worker-0, of train-l4-2 (abc-n3-0), which has failed",
        "inputs of the stage: /tmp/flytune-debug/inputs",
        "kubectl exec -n flytesnacks-development -it abc-n3-0-worker-1-debug-2 -- bash",
        "port-forward -n flytesnacks-development abc-n3-0-worker-0-debug-1 8888:8888",
        "end: flytune debug abc --end --namespace flytesnacks-development",
    ):
        assert line in said


def test_pods_that_are_gone_and_a_cluster_that_refuses(cluster, capsys, monkeypatch):
    assert main(["debug", "abc", "evaluate"]) == 1
    said = capsys.readouterr().err
    assert "evaluate of abc: no pod is left in namespace flytesnacks-development (tasks-report-report" in said
    assert main(["debug", "abc", "--namespace", "hidden"]) == 1
    assert "kubernetes: refuses: 404" in capsys.readouterr().err
    assert main(["debug", "https://flyte.example.com/console/projects/p/domains/d/executions/abc"]) == 1
    assert "Not Found in namespace p-d" in capsys.readouterr().err
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", "/nowhere")
    assert main(["debug", "abc"]) == 1
    assert "there is no valid kubeconfig" in capsys.readouterr().err


def test_the_pods_program_leaves_inputs_and_a_script_that_runs_the_stage(tmp_path):
    from tasks.plan import make_plan

    recipe = Recipe.model_validate(tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 8)))
    stored = tmp_path / "stored"
    stored.mkdir()
    write_inputs(make_plan, stored / "inputs.pb", {"recipe": recipe})
    command = fill_command(make_plan.get_command(SETTINGS), str(stored / "inputs.pb"), str(stored), None)
    environment = os.environ | {
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    program = [sys.executable, "-m", "flytune.cluster.debug_program", "0", "--", *command]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1].endswith(debug_program.READY), done.stderr
    folder = tmp_path / "flytune-debug"
    assert recipe.name in json.dumps(json.loads((folder / "inputs" / "recipe.json").read_text()))
    again = ["sh", str(folder / "again.sh")]
    ran = subprocess.run(again, env=environment, capture_output=True, text=True, timeout=540)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert (folder / "outputs" / "outputs.pb").is_file()
    assert sorted(path.name for path in stored.iterdir()) == ["inputs.pb"], (
        "nothing is written where the run writes"
    )


def test_the_inputs_of_flyte_2_are_read_too(tmp_path):
    from flyteidl2.core import literals_pb2, types_pb2
    from flyteidl2.task import common_pb2

    rows = write_pairs(tmp_path / "pairs.jsonl", 2)
    single = types_pb2.BlobType(dimensionality=types_pb2.BlobType.SINGLE)
    blob = literals_pb2.Blob(uri=str(rows), metadata=literals_pb2.BlobMetadata(type=single))
    recipe = literals_pb2.Binary(value=msgpack.packb({"name": "sums"}), tag="msgpack")
    scalars = {
        "days": literals_pb2.Scalar(primitive=literals_pb2.Primitive(integer=3)),
        "recipe": literals_pb2.Scalar(binary=recipe),
        "../rows": literals_pb2.Scalar(blob=blob),
    }
    inputs = common_pb2.Inputs(
        literals=[
            common_pb2.NamedLiteral(name=name, value=literals_pb2.Literal(scalar=scalar))
            for name, scalar in scalars.items()
        ]
    )
    (tmp_path / "inputs.pb").write_bytes(inputs.SerializeToString())
    command = ["a0", "--inputs", str(tmp_path / "inputs.pb"), "--outputs-path", "s3://bucket/outputs"]
    folder = debug_program.write_inputs(command, tmp_path / "inputs")
    assert json.loads((folder / "recipe.json").read_text()) == {"name": "sums"}
    assert json.loads((folder / "days.json").read_text())["scalar"]["primitive"]["integer"] == "3"
    assert (folder / "___rows").read_bytes() == rows.read_bytes(), "no name leads out of the folder"
