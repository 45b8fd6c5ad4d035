"""Tests of all registered entities and dynamic jobs with the stand-in for Flyte's compiler."""

import pkgutil
from collections import OrderedDict
from importlib import import_module
from typing import Any

import pytest
from flyteidl.core import types_pb2
from flytekit import FlyteContextManager, LaunchPlan, dynamic, map_task, task, workflow
from flytekit.core.context_manager import ExecutionState
from flytekit.core.workflow import WorkflowBase
from flytekit.models.admin.workflow import WorkflowSpec
from flytekit.models.task import TaskSpec
from flytekit.tools.translator import get_serializable
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

import workflows
from flytune.evaluation.task_kind import Job
from flytune.stages.planned import Run, Running
from flytune.training.reference import ReferenceRequest
from tests.support import compiler
from tests.support.execution import errors
from tests.support.plans import recipe_of
from tests.support.registration import SETTINGS
from tests.support.reports import metrics
from tests.support.stages import plan_for
from workflows.sweep import PHASES

prepare_points, train_points, evaluate_points, store_points = PHASES

MODULES = [import_module(f"workflows.{module.name}") for module in pkgutil.iter_modules(workflows.__path__)]
ENTITIES = {
    entity.name: entity
    for module in MODULES
    for entity in vars(module).values()
    if isinstance(entity, WorkflowBase | LaunchPlan)
}
FOLDER = FlyteDirectory("s3://b/f", remote_directory=False)


def array_nodes(message):
    """Yield all array nodes within a message."""
    for field, value in message.ListFields():
        if field.name == "array_node":
            yield value
        if not field.message_type or field.message_type.GetOptions().map_entry:  # only types
            continue
        for inner in value if field.is_repeated else [value]:
            yield from array_nodes(inner)


def over_no_task(message):
    """Return targets of array nodes that open-source Flyte does not support."""
    kinds = [array.node.WhichOneof("target") for array in array_nodes(message)]
    return [kind for kind in kinds if kind != "task_node"]


def test_all_registered_entities_compile():
    assert {
        "workflows.finetune.finetune",
        "workflows.sweep.sweep",
        "workflows.refresh.refresh",
        "nightly",
    } <= set(ENTITIES)
    made = OrderedDict()
    for entity in ENTITIES.values():
        get_serializable(made, SETTINGS, entity)
    tasks = [spec.to_flyte_idl().template for spec in made.values() if isinstance(spec, TaskSpec)]
    specs = [spec.to_flyte_idl() for spec in made.values() if isinstance(spec, WorkflowSpec)]
    assert len(specs) >= 10
    for spec in specs:
        name = spec.template.id.name
        assert over_no_task(spec) == [], name
        assert compiler.errors(spec.template, compiler.Closure(tasks, spec.sub_workflows)) == [], name
    assert any(list(array_nodes(spec)) for spec in specs), "there are some at all"


@pytest.fixture
def running():
    """Four points with two routes, one of several nodes, and two data sections; one point has harness
    tasks."""
    runs = []
    for number, route in enumerate(("cpu-1", "cpu-2", "cpu-2", "t4-8x3")):
        recipe = recipe_of(name=f"p-{number}")
        request = {"model": recipe.model, "data": recipe.data, "fingerprint": str(number % 2)}
        jobs = (
            [Job(task={"name": "choose"}, shard=shard, shards=2) for shard in range(2)] if number == 1 else []
        )
        addresses = {
            "dataset": "s3://b/d",
            "base_files": "s3://b/m",
            "trained": f"s3://b/{number}",
            "harness_data": "s3://b/f",
            "reference_folders": [],
            "export_only": False,
        }
        runs.append(
            Run(
                recipe=recipe,
                plan=plan_for(recipe),
                route=route,
                shape=route,
                request=request,
                base={"name_or_path": f"base-{number % 2}"},
                jobs=jobs,
                scratch_folder="s3://b/k",
                made=addresses,
            )
        )
    return Running(runs=runs, least=2, concurrency=3, notes="s3://b/notes")


def future(task, **inputs):
    """Return the job that a dynamic task's pod returns to propeller."""
    context = FlyteContextManager.current_context().with_serialization_settings(SETTINGS)
    state = context.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    with FlyteContextManager.with_context(context.with_execution_state(state)) as inner:
        try:
            return task.compile_into_workflow(inner, task.task_function, **inputs).to_flyte_idl()
        finally:
            task._wf = None  # cached by flytekit; here one process stands for many pods


def nodes_by_task(job):
    """Return the array nodes of a dynamic job by the name of the mapped task."""
    found = {}
    for node in job.nodes:
        inner = node.array_node.node if node.HasField("array_node") else node
        name = inner.task_node.reference_id.name.rpartition(".")[2].removeprefix("map_")
        found[name.rsplit("_", 1)[0] if node.HasField("array_node") else name] = node
    return found


def check(stage, **inputs):
    """Return the stage's job, after checks that it compiles and that its map tasks are correct."""
    job = future(stage, **inputs)
    assert errors(job, stage.interface.to_flyte_idl().outputs) == []
    assert over_no_task(job) == []
    for array in array_nodes(job):
        assert array.parallelism == 3
        assert (array.HasField("min_success_ratio"), array.min_success_ratio) == (True, 0.0), "all may fail"
    return nodes_by_task(job), job


def test_the_stages_of_a_sweep_map_tasks_with_the_input_s_concurrency(running):
    made, _ = check(prepare_points, running=running)
    assert set(made) == {"prepare_data", "fetch_base_model"}
    both = [[FOLDER, FOLDER]]
    made, job = check(train_points, running=running, dataset=both, base_files=both)
    assert list(made) == ["train_cpu_1", "train_cpu_2", "train_t4_8x3"]
    order = [list(node.upstream_node_ids) for node in made.values()]
    assert order == [[], ["dn0"], ["dn1"]], "at most three points of all routes at a time"
    several = next(task for task in job.tasks if "t4_8x3" in task.id.name)
    assert several.type == "pytorch"
    assert several.custom["elasticConfig"]["minReplicas"] == 3
    models = [[FOLDER], [FOLDER, FOLDER], [FOLDER]]
    made, _ = check(evaluate_points, running=running, trained=models)
    assert set(made) == {f"evaluate_model_{name}" for name in ("cpu_1", "cpu_2", "t4_8x3")} | {
        "evaluate_tasks_cpu_2"
    }
    asked = {binding.var: binding.binding for binding in made["evaluate_tasks_cpu_2"].inputs}
    assert {len(binding.collection.bindings) for binding in asked.values()} == {2}, "both parts of one point"
    scores = [[metrics()], [metrics(), metrics()], [metrics()]]
    answers = [[FlyteFile("s3://b/1", remote_path=False), FlyteFile("s3://b/2", remote_path=False)]]
    made, _ = check(store_points, running=running, metrics=scores, answers=answers)
    assert set(made) == {"store_artifact"}


def with_references(running):
    """Return the runs with the reference's log-probabilities as results of a task before training."""
    runs = []
    for number, run in enumerate(running.runs):
        recipe = recipe_of(name=run.recipe.name, objective="dpo")
        asked = ReferenceRequest(
            recipe=recipe, request=run.request, base=run.base, adapter_sha256=str(number % 3)
        )
        runs.append(run.model_copy(update={"references": [asked], "reference_shape": "cpu-1"}))
    return running.model_copy(update={"runs": runs})


def test_references_are_computed_before_training_and_points_that_are_equal_share_them(running):
    asked = with_references(running)
    data = [[FOLDER, FOLDER]]
    made, job = check(train_points, running=asked, dataset=data, base_files=data)
    assert list(made) == ["reference_log_probs_cpu_1", "train_points_after_reference"]
    (lists,) = {len(one.binding.collection.bindings) for one in made["reference_log_probs_cpu_1"].inputs}
    assert lists == 4, "each point has another data set or adapter"
    equal = asked.model_copy(
        update={"runs": [asked.runs[0], asked.runs[0].model_copy(update={"recipe": recipe_of(name="x")})]}
    )
    job = future(train_points, running=equal, dataset=[[FOLDER]], base_files=[[FOLDER]])
    assert errors(job, train_points.interface.to_flyte_idl().outputs) == []
    assert not list(array_nodes(job)), "the cache is that of finetune"
    folders, after_reference = (
        [[FOLDER] * 4],
        vars(import_module("workflows.sweep"))["train_points_after_reference"],
    )
    made, job = check(after_reference, running=with_made(asked), reference_folders=folders)
    assert list(made) == ["train_cpu_1", "train_cpu_2", "train_t4_8x3"]
    given = [one.binding for one in made["train_cpu_2"].inputs if one.var == "references"]
    assert [len(binding.collection.bindings) for binding in given[0].collection.bindings] == [1, 1]


def with_made(running):
    """Return the runs without the results that the task before has yet to give."""
    kept = {name: value for name, value in running.runs[0].made.items() if name != "reference_folders"}
    return running.model_copy(
        update={"runs": [run.model_copy(update={"made": kept}) for run in running.runs]}
    )


def test_points_that_share_data_and_base_prepare_them_by_the_task_itself(running):
    first = running.model_copy(update={"runs": [running.runs[0], running.runs[2]]})
    job = future(prepare_points, running=first)
    assert errors(job, prepare_points.interface.to_flyte_idl().outputs) == []
    assert not list(array_nodes(job)), "the cache is that of finetune"
    assert set(nodes_by_task(job)) == {"prepare_data", "fetch_base_model"}


def test_a_map_task_s_pods_are_those_of_its_task(running):
    from tasks.train import TRAIN
    from tests.support.registration import proto

    job = future(train_points, running=running, dataset=[[FOLDER, FOLDER]], base_files=[[FOLDER, FOLDER]])
    for route in ("cpu-1", "t4-8x3"):
        (made,) = [task for task in job.tasks if f"_{TRAIN[route].name.rpartition('.')[2]}_" in task.id.name]
        own = proto(TRAIN[route])
        assert made.metadata.retries == own.metadata.retries
        assert made.metadata.interruptible == own.metadata.interruptible
        assert made.custom == own.custom
        assert made.extended_resources == own.extended_resources
        assert made.k8s_pod.metadata == own.k8s_pod.metadata
        for pod in (made.k8s_pod.pod_spec, own.k8s_pod.pod_spec):
            del pod["containers"][0]["args"]
        assert made.k8s_pod.pod_spec == own.k8s_pod.pod_spec


@task
def tell(recipe: str, notes: str) -> str:
    return recipe + notes


@workflow
def point(recipe: str, notes: str) -> str:
    told: str = tell(recipe=recipe, notes=notes)
    return told


POINT = LaunchPlan.get_or_create(point, name="tests_point")


@dynamic
def over_a_launch_plan(recipes: list[str], notes: str) -> list[str | None]:
    points = map_task(POINT, concurrency=2, min_successes=1, min_success_ratio=0.5)
    found: list[str | None] = points(recipe=recipes, notes=[notes] * len(recipes))
    return found


@workflow
def statically(recipes: list[str], notes: list[str]) -> list[str]:
    found: Any = map_task(POINT)(recipe=recipes, notes=notes)
    return found


def plans(entity):
    """Return the closure of an entity that maps over `POINT`."""
    made = OrderedDict()
    spec = get_serializable(made, SETTINGS, entity)
    get_serializable(made, SETTINGS, POINT)
    tasks = [one.to_flyte_idl().template for one in made.values() if isinstance(one, TaskSpec)]
    specs = [one.to_flyte_idl().template for one in made.values() if isinstance(one, WorkflowSpec)]
    return spec, compiler.Closure(tasks, specs, {"tests_point": (point.name, [])})


def test_a_map_over_a_launch_plan_is_refused_as_by_flyte():
    from flyteidl.core import workflow_pb2

    job = future(over_a_launch_plan, recipes=["a", "b"], notes="s3://b/n")
    assert over_no_task(job) == ["workflow_node"]
    template = workflow_pb2.WorkflowTemplate(nodes=job.nodes, outputs=job.outputs)
    template.interface.outputs.CopyFrom(over_a_launch_plan.interface.to_flyte_idl().outputs)
    _, closure = plans(statically)
    found = compiler.errors(template, closure)
    assert (
        "MismatchingBindings: input [notes] on node [dn0] expects simple: STRING. Received bindings" in found
    )
    spec, closure = plans(statically)
    found = compiler.errors(spec.to_flyte_idl().template, closure)
    assert any(one.startswith("MismatchingTypes: [notes] of node [n0]") for one in found)


def kind(**fields):
    return types_pb2.LiteralType(**fields)


@pytest.mark.parametrize(
    ("upstream", "downstream", "fits"),
    [
        (kind(simple=types_pb2.STRING), kind(simple=types_pb2.STRING), True),
        (kind(simple=types_pb2.STRING), kind(simple=types_pb2.INTEGER), False),
        (kind(simple=types_pb2.STRING), kind(collection_type=kind(simple=types_pb2.STRING)), False),
        (kind(blob=types_pb2.BlobType(format="csv")), kind(blob=types_pb2.BlobType()), True),
        (kind(blob=types_pb2.BlobType(format="csv")), kind(blob=types_pb2.BlobType(format="x")), False),
        (
            kind(simple=types_pb2.NONE),
            kind(
                union_type=types_pb2.UnionType(
                    variants=[kind(simple=types_pb2.NONE), kind(simple=types_pb2.STRING)]
                )
            ),
            True,
        ),
        (
            kind(
                union_type=types_pb2.UnionType(
                    variants=[kind(simple=types_pb2.NONE), kind(simple=types_pb2.STRING)]
                )
            ),
            kind(simple=types_pb2.STRING),
            False,
        ),
    ],
)
def test_types_are_castable_as_in_flytepropeller(upstream, downstream, fits):
    assert compiler.castable(upstream, downstream) is fits
