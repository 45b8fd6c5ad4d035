"""Tests of all registered tasks in serialized form: resources, Elastic configuration and pod template."""

import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
from flytekit import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.core.type_engine import TypeEngine
from flytekit.models.types import SimpleType
from flytekit.tools.translator import get_serializable
from google.protobuf import json_format

from flytune.errors import RecipeError
from flytune.failures.table import RETRIES
from flytune.hardware import load_shapes, shape_named
from flytune.recipe import Recipe
from flytune.sharding import ONE_PROCESS
from flytune.stages.stored import with_checkpoint_folder
from tasks.evaluate import EVALUATE
from tasks.plan import make_plan
from tasks.prepare import prepare_data
from tasks.runtime.orchestrator import FLYTE
from tasks.store import store_artifact
from tasks.train import TRAIN
from tests.support.paths import ROOT
from tests.support.plans import recipe_of
from tests.support.registration import SETTINGS, limits, proto
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs
from workflows.finetune import finetune


@pytest.mark.parametrize("shape", load_shapes(), ids=lambda shape: shape.name)
def test_a_shape_is_a_train_task_with_its_machines(shape):
    MessageToDict = json_format.MessageToDict
    task = TRAIN[shape.name]
    template = proto(task)
    pod = MessageToDict(template.k8s_pod.pod_spec)
    assert template.id.name == f"tasks.train.train_{shape.identifier}"
    asked = limits(pod)
    assert asked["cpu"] == str(shape.cpu)
    assert asked["memory"] == f"{shape.memory_gib}Gi"
    assert asked["ephemeral-storage"] == f"{shape.disk_gib}Gi"
    assert asked.get("nvidia.com/gpu") == (str(shape.processes) if shape.is_gpu else None)
    assert asked.get("vpc.amazonaws.com/efa") == (
        str(shape.network_devices) if shape.network == "efa" else None
    )
    assert pod["containers"][0]["resources"]["requests"] == asked
    assert all(isinstance(value, str) for value in asked.values())
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"]}
    assert volumes["dshm"] == {"medium": "Memory", "sizeLimit": f"{shape.shared_memory_gib}Gi"}
    assert volumes["scratch"] == {"sizeLimit": f"{shape.disk_gib}Gi"}
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts.items() >= {"dshm": "/dev/shm", "scratch": "/scratch"}.items()
    assert pod["terminationGracePeriodSeconds"] == 60
    assert template.metadata.interruptible is shape.spot
    assert template.metadata.retries.retries == RETRIES
    assert not template.metadata.discoverable
    assert template.config["primary_container_name"] == pod["containers"][0]["name"]
    if shape.is_gpu:
        assert template.extended_resources.gpu_accelerator.device.startswith("nvidia-")
    if shape.nodes > 1:
        custom = MessageToDict(template.custom)
        assert template.type == "pytorch"
        assert custom["elasticConfig"]["nprocPerNode"] == shape.processes
        assert custom["elasticConfig"]["minReplicas"] == custom["elasticConfig"]["maxReplicas"] == shape.nodes
        assert custom["workerReplicas"]["replicas"] == shape.nodes
        assert custom["runPolicy"]["cleanPodPolicy"] == "CLEANPOD_POLICY_RUNNING"
    else:
        assert template.type == "python-task"
    if shape.world_size > 1:
        elastic = task.task_config
        assert (elastic.nnodes, elastic.nproc_per_node) == (shape.nodes, shape.processes)
        assert elastic.increase_shared_mem is False


def test_device_map_runs_in_one_process_without_elastic_on_every_single_node_of_gpus():
    for shape in load_shapes():
        route = shape.name + (ONE_PROCESS if shape.processes > 1 else "")
        if shape.is_gpu and shape.nodes == 1:
            assert TRAIN[route].task_config is None
            assert TRAIN[route].get_config(SETTINGS) == {"primary_container_name": "primary"}
        else:
            assert shape.name + ONE_PROCESS not in TRAIN


@pytest.mark.parametrize("shape", load_shapes(), ids=lambda shape: shape.name)
def test_a_shape_is_an_evaluate_task_on_one_node(shape):
    template = proto(EVALUATE[shape.name])
    assert template.type == "python-task"
    assert template.id.name == f"tasks.evaluate.evaluate_model_{shape.identifier}"
    assert template.metadata.retries.retries == RETRIES
    pod = json_format.MessageToDict(template.k8s_pod.pod_spec)
    assert "affinity" not in pod
    assert "vpc.amazonaws.com/efa" not in limits(pod)


def test_pods_find_their_tasks_by_module_and_name():
    import importlib

    for task in [*TRAIN.values(), *EVALUATE.values()]:
        module, _, name = task.name.rpartition(".")
        assert getattr(importlib.import_module(module), name) is task
        assert task.get_command(SETTINGS)[-4:] == ["task-module", module, "task-name", name]


def test_ranks_are_declared_as_the_plugin_does_but_without_torch():
    from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask

    from tasks.runtime.ranks import of_shape

    for name, task in TRAIN.items():
        shape = shape_named(name.removesuffix(ONE_PROCESS))
        if shape.world_size == 1 or name != shape.name:
            continue
        theirs = PytorchElasticFunctionTask(of_shape(shape, shape.processes), task.task_function)
        for attribute in ("task_type", "task_type_version", "min_nodes", "max_nodes", "rdzv_backend"):
            assert getattr(task, attribute) == getattr(theirs, attribute), (name, attribute)
        assert set(vars(theirs)) <= set(vars(task)), name
        assert theirs.get_custom(SETTINGS) == task.get_custom(SETTINGS), name


def test_pod_templates_are_not_shared():
    templates = [id(task.pod_template) for task in [*TRAIN.values(), *EVALUATE.values()]]
    assert len(set(templates)) == len(templates)


def test_small_tasks_request_no_gpu_and_prepare_is_cached():
    for task in (make_plan, prepare_data, store_artifact):
        pod = json_format.MessageToDict(proto(task).k8s_pod.pod_spec)
        assert not [name for name in pod["containers"][0]["resources"]["requests"] if "gpu" in name]
    assert proto(prepare_data).metadata.discoverable
    assert proto(prepare_data).metadata.discovery_version
    assert not proto(make_plan).metadata.discoverable


def test_the_workflow_routes_to_every_task():
    entities = OrderedDict()
    get_serializable(entities, SETTINGS, finetune)
    names = {entity.name for entity in entities if hasattr(entity, "name")}
    assert {task.name for task in [*TRAIN.values(), *EVALUATE.values()]} <= names


def test_nothing_of_this_machine_is_in_what_a_cluster_gets(monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "FLYTUNE_WEBHOOK", "_FSEC_HF_TOKEN"):
        monkeypatch.setenv(name, "planted-secret")
    entities = OrderedDict()
    get_serializable(entities, SETTINGS, finetune)
    sent = b"".join(
        entity.to_flyte_idl().SerializeToString()
        for entity in entities.values()
        if hasattr(entity, "to_flyte_idl")
    )
    assert b"train_h100_8x8" in sent
    assert b"/scratch" in sent
    here = ROOT
    for own in ("planted-secret", str(here), f"{Path.home()}/", ".venv"):
        assert own.encode() not in sent, own


@pytest.mark.parametrize(
    ("prefix", "folder"),
    [
        ("s3://bucket/ab/execution-n0-0", "s3://bucket/flytune-checkpoints"),
        ("gs://bucket/team/data/x7/execution-n0-1/", "gs://bucket/team/data/flytune-checkpoints"),
        ("s3://bucket/execution-n0-0", "s3://bucket/flytune-checkpoints"),
    ],
)
def test_checkpoints_are_outside_the_folder_of_one_attempt(prefix, folder):
    with FlyteContextManager.with_context(context(prefix)):
        assert with_checkpoint_folder(FLYTE, recipe_of()).checkpoints.address == folder
        named = recipe_of(checkpoints={"folder": "/mnt/runs"})
        assert with_checkpoint_folder(FLYTE, named) == named


def test_checkpoints_of_a_local_run_are_local(tmp_path):
    for prefix in (str(tmp_path), f"file://{tmp_path}"):
        with FlyteContextManager.with_context(context(prefix)):
            assert with_checkpoint_folder(FLYTE, recipe_of()).checkpoints.address == ".checkpoints"


def test_a_rank_in_an_interpreter_of_its_own_knows_where_the_attempt_stores_its_data():
    with FlyteContextManager.with_context(context("s3://bucket/ab/execution-n0-0")):
        pickled = pickle.dumps(FLYTE).hex()
    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).shared_address('x'))"
    done = subprocess.run(
        [sys.executable, "-c", code, pickled], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "s3://bucket/flytune-x"


def context(prefix):
    """Return the Flyte context of a pod whose outputs go below `prefix`."""
    provider = FileAccessProvider("/tmp/unused", prefix)
    return FlyteContextManager.current_context().with_file_access(provider)


def test_evaluation_may_have_another_shape(tmp_path):
    base, data = tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 8)
    planned = make_plan(recipe=Recipe.model_validate(tiny_recipe(base, data, {"evaluation.shape": "cpu-2"})))
    assert (planned.plan.shape, planned.shape) == ("cpu-1", "cpu-2")
    with pytest.raises(RecipeError, match="no row none-such"):
        make_plan(recipe=Recipe.model_validate(tiny_recipe(base, data, {"evaluation.shape": "none-such"})))


def light_pods(workflow, specs, tasks):
    """Return the number of light pods on the longest path through a workflow; each costs 20 to 60 s."""
    count = 0
    for node in workflow.nodes:
        if node.HasField("branch_node"):
            block = node.branch_node.if_else
            cases = [case.then_node for case in [block.case, *block.other]]
            count += max(light_pods(type(workflow)(nodes=[case]), specs, tasks) for case in cases)
        elif node.HasField("workflow_node"):
            count += light_pods(specs[node.workflow_node.sub_workflow_ref.name], specs, tasks)
        elif node.HasField("task_node"):
            # Pods of shapes have /scratch.
            pod = json_format.MessageToDict(tasks[node.task_node.reference_id.name].k8s_pod.pod_spec)
            count += all(volume["name"] != "scratch" for volume in pod["volumes"])
    return count


@pytest.mark.parametrize(
    ("name", "pods"),
    [
        ("finetune", 4),  # plan, base model, data (both cached), store
        ("refresh", 6),  # finetune's, with decide before them and promote after them
        ("infer", 3),  # split, base model, join
        ("sweep", 6),  # draw and compare, four dynamic stages, and store for each point
    ],
)
def test_the_number_of_light_pods_on_the_longest_path(name, pods):
    from importlib import import_module

    from flytekit.models.admin.workflow import WorkflowSpec
    from flytekit.models.task import TaskSpec

    entities = OrderedDict()
    spec = get_serializable(
        entities, SETTINGS, getattr(import_module(f"workflows.{name}"), name)
    ).to_flyte_idl()
    made = [
        entity.to_flyte_idl().template
        for entity in entities.values()
        if isinstance(entity, TaskSpec | WorkflowSpec)
    ]
    tasks = {one.id.name: one for one in made if not hasattr(one, "nodes")}
    assert (
        light_pods(spec.template, {one.id.name: one for one in made if hasattr(one, "nodes")}, tasks) == pods
    )


@pytest.mark.parametrize("name", ["finetune", "refresh", "sweep", "infer"])
def test_a_workflow_with_all_its_tasks_is_within_flyteadmins_limit(name):
    """Limits: 2 MB, flytestdlib's default of storage.limits.maxDownloadMBs; 1.5 MiB, etcd's for an
    execution's object."""
    from importlib import import_module

    from flytekit.models.admin.workflow import WorkflowSpec
    from flytekit.models.task import TaskSpec

    workflow, entities = getattr(import_module(f"workflows.{name}"), name), OrderedDict()
    get_serializable(entities, SETTINGS, workflow)
    specs = [made for made in entities.values() if isinstance(made, TaskSpec | WorkflowSpec)]
    assert sum(made.to_flyte_idl().ByteSize() for made in specs) < 1_500_000


def test_a_class_s_schema_is_made_once():
    assert TypeEngine.to_literal_type(Recipe) is TypeEngine.to_literal_type(Recipe)


def test_workflows_keep_the_schema_of_their_recipe_for_the_console_and_tasks_do_not():
    from tasks.plan import make_plan
    from workflows.finetune import finetune

    for entity, has in ((finetune, True), (make_plan, False), (TRAIN["cpu-2"], False)):
        kind = entity.interface.to_flyte_idl().inputs.variables["recipe"].type
        assert (len(kind.metadata.fields) > 0) is has
        assert kind.simple == SimpleType.STRUCT
