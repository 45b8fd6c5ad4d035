"""Tests of the code and protos that `pyflyte run --remote` and `pyflyte register` send, run in isolated pods.

No cluster: tests/support/flyteadmin.py stands for the control plane, tests/support/propeller.py for what
starts pods.
"""

import io
import json
import tarfile
from pathlib import Path

import pytest
import yaml
from flytekit.configuration import SERIALIZED_CONTEXT_ENV_VAR, SerializationSettings
from flytekit.models.core.identifier import ResourceType
from google.protobuf.json_format import MessageToDict

import images
from flytune.hardware import load_shapes
from flytune.records import TrainingResult
from tests.support import flytectl, fork_server
from tests.support.execution import Run
from tests.support.laptop import REST, SECRET, SECRETS, VOLUME, WHERE, pyflyte, submit
from tests.support.make import lines
from tests.support.propeller import IMAGES, PodFailed, container_of, image_name, working_directory
from tests.support.tiny import cluster_recipe, tiny_base, write_pairs

NOT_PYTHON = {
    *(
        "shapes.yaml",
        "cluster.yaml",
        "accelerators.yaml",
        "deepspeed_configs/zero2.json",
        "chat_templates/chatml.jinja",
    ),
    *(
        "recipes/demo-qlora.yaml",
        "flytune/report/templates/report.html.jinja",
        "flytune/models/base_models.json",
        "images/compile_deepspeed.sh",
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return fork_server.call(tiny_base, folder), write_pairs(folder / "pairs.jsonl", 64)


@pytest.fixture(scope="module")
def registered(laptop, cluster):
    """The admin after `pyflyte register`."""
    admin, _, home = cluster
    done = pyflyte(laptop, home, "register", "--copy", "all", "--destination-dir", ".", *WHERE, "workflows")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return admin


@pytest.mark.slow
def test_the_uploaded_code_is_the_project_and_nothing_of_the_laptop(registered, laptop):
    with tarfile.open(fileobj=io.BytesIO(registered.stored(registered.uploads[-1]))) as archive:
        files = {one.name: archive.extractfile(one).read() for one in archive if one.isfile()}
        assert not [one.name for one in archive if not (one.isfile() or one.isdir())]
    assert set(files) >= NOT_PYTHON
    python = {
        str(file.relative_to(laptop))
        for top in ("flytune", "training_estimates", "tasks", "workflows")
        for file in (laptop / top).rglob("*.py")
    }
    assert set(files) >= python
    assert not {name.split("/")[0] for name in files} & {
        ".git",
        ".venv",
        ".demo",
        ".checkpoints",
        "tests",
        "docs",
        "benchmarks",
    }
    assert not set(files) & {*SECRETS, *REST}
    assert not [
        name
        for name, content in files.items()
        if SECRET.encode() in content or str(laptop).encode() in content
    ]


def test_no_proto_holds_a_variable_or_a_path_of_the_laptop(registered, laptop):
    received = [*registered.tasks.values(), *registered.workflows.values(), *registered.launch_plans.values()]
    assert len(received) > 2 * len(load_shapes())
    for request in received:
        sent = request.SerializeToString()
        assert SECRET.encode() not in sent, request.id.name
        assert str(laptop.parent).encode() not in sent, request.id.name


def test_no_dynamic_task_s_settings_hold_the_laptop_s_folder_or_its_remote_s_credentials(registered, laptop):
    settings = {name: sent for name, request in registered.tasks.items() if (sent := settings_of(request))}
    assert len(settings) == 5
    for name, sent in settings.items():
        assert sent["fast_serialization_settings"]["destination_dir"] == ".", name
        assert (sent["git_repo"], sent["source_root"]) == (None, None), name
        assert SECRET not in json.dumps(sent), name
        assert str(laptop.parent) not in json.dumps(sent), name


def settings_of(request):
    """Return the settings that flytekit compresses into a variable of a dynamic task's pod; None for another
    task."""
    packed = container_of(request.spec.template)[1].get(SERIALIZED_CONTEXT_ENV_VAR)
    return json.loads(SerializationSettings.from_transport(packed).to_json()) if packed else None


@pytest.mark.slow
def test_a_package_registers_what_make_register_sends_byte_for_byte(
    registered, laptop, cluster, tmp_path, monkeypatch
):
    _, _, home = cluster
    command = lines("package", PACKAGE=tmp_path / "package.tgz")[-1].split()
    done = pyflyte(laptop, home, *command[1:])
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    sent = {kind: dict(getattr(registered, kind)) for kind in ("tasks", "workflows", "launch_plans")}
    for kind in sent:
        monkeypatch.setattr(registered, kind, {})
    addresses = [registered.uploads[-1]]
    flytectl.register(
        home, tmp_path / "package.tgz", WHERE[1], WHERE[3], sent["tasks"]["tasks.plan.make_plan"].id.version
    )
    addresses.append(registered.uploads.pop())
    for kind, entities in sent.items():
        packaged = getattr(registered, kind)
        assert set(packaged) == set(entities)
        for name, request in entities.items():
            assert neutral(packaged[name], addresses) == neutral(request, addresses), name
    assert len({frozenset(code_of(registered.stored(address)).items()) for address in addresses}) == 1


def neutral(request, addresses):
    """Return a request's bytes, and the settings of a dynamic task, without the code's address and names that
    pods set."""
    copy, settings = type(request).FromString(request.SerializeToString()), None
    if copy.id.resource_type == ResourceType.TASK:
        settings = settings_of(copy)
        for container in copy.spec.template.k8s_pod.pod_spec["containers"]:
            container["args"] = ["CODE" if one in addresses else one for one in container["args"]]
            for variable in container["env"]:
                if variable["name"] == SERIALIZED_CONTEXT_ENV_VAR:
                    variable["value"] = ""
    if settings is not None:
        # flytekit's entrypoint sets them in the pod.
        for name in ("project", "domain", "version"):
            settings.pop(name)
        settings["fast_serialization_settings"].pop("distribution_location")
    return copy.SerializeToString(deterministic=True), settings


def code_of(archive):
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        return {file.name: (file.mode, files.extractfile(file).read()) for file in files if file.isfile()}


def test_every_pod_that_reads_a_recipe_mounts_the_cluster_s_volume(registered):
    lacking = []
    for name, request in registered.tasks.items():
        pod = MessageToDict(request.spec.template.k8s_pod.pod_spec)
        volumes = [volume.get("persistentVolumeClaim") for volume in pod.get("volumes", [])]
        mounts = [
            mount["mountPath"] for one in pod.get("containers", []) for mount in one.get("volumeMounts", [])
        ]
        if {"claimName": VOLUME["persistent_volume_claim"]} not in volumes or VOLUME[
            "mount_path"
        ] not in mounts:
            lacking.append(name)
    assert len(registered.tasks) > 2 * len(load_shapes())
    assert lacking == []


def test_every_pod_unpacks_the_code_into_a_writable_folder_and_gets_only_our_variables(registered):
    for name, request in registered.tasks.items():
        command, variables = container_of(request.spec.template)
        assert command[0] == "pyflyte-fast-execute", name
        # The pod's working directory; pyflyte register's own default is /root, where the images' user may not
        # write.
        assert command[command.index("--dest-dir") + 1] == ".", name
        assert working_directory(request.spec.template) == "/code", name
        assert variables["PYTHONPATH"].startswith("/code:"), name
        assert image_name(request.spec.template) in IMAGES.values(), name
        assert command[command.index("--additional-distribution") + 1] == registered.uploads[-1]
        # A task that leaves a question to a person compiles what asks it.
        is_dynamic = name.startswith("workflows.sweep.") or name in ASKING
        assert set(variables) <= OURS | (DYNAMIC if is_dynamic else set()), name
        if is_dynamic:
            # Its pod declares tasks, without the variables of the registration.
            named = {key: value for key, value in variables.items() if key in images.environment()}
            kinds = {"FLYTUNE_TRAIN_IMAGE": IMAGES["train"], "FLYTUNE_LIGHT_IMAGE": IMAGES["light"]}
            assert named == {"FLYTUNE_IMAGES": "dockerfile", **kinds}, name


ASKING = ("tasks.store.store_artifact", "tasks.promote.promote_challenger")
# Variables that a task may declare.
OURS = {"HF_HUB_OFFLINE", "HF_HOME", "NCCL_DEBUG", "FI_PROVIDER", "OMP_NUM_THREADS", "TMPDIR", "HF_HUB_CACHE"}
OURS |= {"FI_EFA_USE_HUGE_PAGE", "NCCL_NET", "PYTHONPATH", "FLYTUNE_RETRIES"}
# A dynamic task compiles in its pod: by flytekit's own settings of the registration, and with its images.
DYNAMIC = {SERIALIZED_CONTEXT_ENV_VAR, *images.environment()}


def test_a_condition_leads_to_each_task_or_to_our_error(registered):
    nodes = registered.workflows["workflows.finetune.finetune"].spec.template.nodes
    branches = {node.id: node.branch_node.if_else for node in nodes if node.HasField("branch_node")}
    assert len(branches) == 4
    for branch in branches.values():
        cases = [branch.case, *branch.other]
        values = [case.condition.comparison.right_value.primitive.string_value for case in cases]
        # Mapped tasks are within an array node.
        nodes = [
            case.then_node.array_node.node if case.then_node.HasField("array_node") else case.then_node
            for case in cases
        ]
        tasks = [node.task_node.reference_id.name.rpartition(".")[2] for node in nodes]
        assert len(set(values)) == len(set(tasks)) == len(cases) > len(load_shapes())
        for value, task in zip(values, tasks, strict=True):
            assert value.replace("-", "_") in task
        assert "no such shape is registered" in branch.error.message


def test_a_schedule_is_received_with_its_recipe_and_inactive(registered):
    plan = registered.launch_plans["weekly"].spec
    assert plan.entity_metadata.schedule.cron_schedule.schedule == "0 2 * * 1"
    assert plan.workflow_id.name == "workflows.refresh.refresh"
    assert set(plan.fixed_inputs.literals) == {"recipe", "accepted", "days"}
    assert registered.active == []


@pytest.mark.slow
def test_a_mistake_in_a_recipe_is_reported_before_anything_is_sent(laptop, cluster, inputs):
    admin, _, home = cluster
    before = len(admin.uploads), set(admin.executions)
    (home / "bad.yaml").write_text(yaml.safe_dump(cluster_recipe(*inputs, {"training.learning_rat": 1})))
    what = ["workflows/finetune.py", "finetune", "--recipe", str(home / "bad.yaml")]
    done = pyflyte(laptop, home, "run", "--remote", "--copy", "all", *WHERE, *what)
    assert done.returncode != 0
    assert "training.learning_rat: unknown key; did you mean learning_rate?" in done.stderr
    assert (len(admin.uploads), set(admin.executions)) == before


@pytest.mark.journey
def test_a_submitted_recipe_runs_from_only_the_uploaded_code(laptop, cluster, inputs, tmp_path):
    admin, storage, home = cluster
    changes = {"sharding": "zero2", "hardware.shape": "cpu-2", "checkpoints": {"save_steps": 2}}
    name = submit(laptop, home, admin, cluster_recipe(*inputs, changes))
    run = Run(admin, name, tmp_path / "run", storage)
    trained = run.until("train")["o0"].scalar.blob.uri
    assert set(run.taken.values()) >= {"make_plan", "prepare_data", "train_cpu_2"}
    folder = admin.fetch(trained, tmp_path / "trained")
    assert TrainingResult.read(folder / "training.json").world_size == 2
    assert (folder / "model" / "model.safetensors").is_file()
    assert admin.keys("flytune-checkpoints/"), "below the cluster's raw output location"
    for pod in (tmp_path / "run").glob("*/0"):
        imported = {Path(line) for line in (pod / "imported").read_text().splitlines()}
        assert {file.name for file in imported} >= {"recipe.py", "errors.py"}
        assert {file for file in imported if not file.is_relative_to(pod / "app")} == set()


@pytest.mark.slow
def test_a_task_s_error_has_our_text(laptop, cluster, inputs, tmp_path):
    admin, storage, home = cluster
    name = submit(laptop, home, admin, cluster_recipe(*inputs, {"sharding": "device_map"}))
    with pytest.raises(
        PodFailed, match="method full with sharding device_map: a 16-bit model spread by layers"
    ):
        Run(admin, name, tmp_path, storage).until("make_plan")
