"""Stages as Flyte's tasks: a stage's function and its row of the table become the task of a module."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from flytekit import Cache, Deck, task
from flytekit.core.array_node_map_task import array_node_map_task
from flytekit.models.dynamic_job import DynamicJobSpec

import images
from flytune.hardware import Shape, load_cluster, load_shapes
from flytune.sharding import ONE_PROCESS
from flytune.stages.attempts import record_phase
from flytune.stages.calls import Call, processes_of
from flytune.stages.orchestrator import Folder
from flytune.stages.table import Phase, Stage
from flytune.stages.value_types import as_function, hints_of
from tasks.runtime import approval, pods, termination, values
from tasks.runtime.orchestrator import FLYTE, attempts_address
from tasks.runtime.retries import classified
from tasks.runtime.schema import without_schema
from tasks.runtime.secrets import secrets

TASKS: dict[str, Any] = {}
"""Declared tasks by the names of their stages; of a stage on shapes, a dict by the keys of the shapes."""
PLAN_IMAGE = images.TRAIN if load_cluster().plan_in_training_image else images.LIGHT
"""Image of the tasks that plan."""


def light(stage: Stage, module: dict[str, Any], function: Callable[..., Any] | None = None) -> Any:
    """Declare the task of a stage in a light pod; `function` is given where the row has several."""
    assert stage.requests is not None
    function = function or stage.load()
    declared = task(
        container_image=PLAN_IMAGE if stage.place == "plan" else images.LIGHT,
        retries=stage.retries,
        # A stage that asks registers the tasks of the answer, by the images' names.
        **pods.light(stage.requests, images.environment if stage.asks else dict),
        **_common(stage),
    )(_task_function(stage, function, module, function.__name__))
    TASKS[stage.name] = without_schema(declared)
    return TASKS[stage.name]


def on_shapes(
    stage: Stage, module: dict[str, Any], job: Callable[[Shape, int], Any] | None = None, per_item: str = ""
) -> dict[str, Any]:
    """Declare the tasks of a stage on each row of shapes.yaml; return them by the rows' names, or routes.

    A stage in all processes of a row is an Elastic (torchrun) task where these are several; one that trains
    has on one node with several GPUs a second task of one process, without Elastic.

    Args:
        job: function that returns the configuration of the job of a shape's ranks.
        per_item: input over which the tasks are map tasks.
    """
    function = stage.load()
    on_all = stage.place == "shape"
    declared: dict[str, Any] = {}
    for shape in load_shapes():
        has_routes = on_all and stage.fetch and shape.nodes == 1 and shape.is_gpu and shape.processes > 1
        for key in (shape.name, shape.name + ONE_PROCESS) if has_routes else (shape.name,):
            name = f"{stage.name if on_all else function.__name__}_{key.replace('-', '_')}"
            machines = shape if on_all else shape.one_node
            declared[key] = on_shape(stage, function, module, name, machines, processes_of(stage, key), job)
    if per_item:
        declared = {
            key: without_schema(
                array_node_map_task(mapped, bound_inputs=mapped.python_interface.inputs.keys() - {per_item})
            )
            for key, mapped in declared.items()
        }
    TASKS[stage.name] = declared
    return declared


def on_shape(
    stage: Stage,
    function: Callable[..., Any],
    module: dict[str, Any],
    name: str,
    shape: Shape,
    processes: int = 0,
    job: Callable[[Shape, int], Any] | None = None,
) -> Any:
    """Declare a stage's function as a task of a module on one shape, with `processes` ranks a node; 0 if its
    process is the only one."""
    config = {"task_config": job(shape, processes)} if job and processes else {}
    body = _task_function(stage, function, module, name, shape, processes)
    module[name] = without_schema(task(**config, **pods.on_shape(shape), **_common(stage))(body))
    return module[name]


def declare_run(phases: Iterable[Phase], module: dict[str, Any]) -> dict[str, Any]:
    """Declare the stages of a run, and return all declared tasks; a stage without a module of tasks/ gets its
    tasks in `module`.

    The others keep theirs: their tasks are registered, and their results are cached, under its name.
    """
    modules = {path.stem for path in Path(module["__file__"]).parent.glob("*.py")}
    for stage in [stage for phase in phases for stage in phase.stages]:
        if stage.name in modules:
            import_module(f"{module['__package__']}.{stage.name}")
        elif stage.place == "node":
            on_shapes(stage, module)
        else:
            module[stage.function.partition(".")[2]] = light(stage, module)
    return TASKS


def _task_function(
    stage: Stage,
    function: Callable[..., Any],
    module: dict[str, Any],
    name: str,
    shape: Shape | None = None,
    processes: int = 0,
) -> Callable[..., Any]:
    """Return a stage's function with Flyte's types, in a module of tasks."""
    kinds = hints_of(function)

    def run(**inputs: Any) -> Any:
        given = {name: values.TYPES.to_stage(value, kinds[name]) for name, value in inputs.items()}
        termination.note(given.get("recipe"))
        try:
            result = _result_of(stage, Call(function, FLYTE, given, shape, processes, stage.load_fetch()))
        finally:
            if shape is not None:
                # torchelastic's handler raises in the main thread whatever runs there, and flytekit treats an
                # error in an upload as final.
                termination.ignore_sigterm()
        if not isinstance(result, DynamicJobSpec):
            return values.output(stage, result, kinds["return"])
        if stage.report:
            Deck.publish()  # flytekit leaves out the decks of such a task
        return result

    signature = values.TYPES.signature(function, values.output_type(stage, kinds["return"]))
    task_function: Callable[..., Any] = as_function(run, function, module["__name__"], name, signature)
    return task_function


def _result_of(stage: Stage, call: Call) -> Any:
    """Return what a stage makes, or the nodes that ask a person where it has left a question."""
    failures = (
        classified(trains=call.fetch is not None) if stage.retries or call.shape else contextlib.nullcontext()
    )
    phase = record_phase(stage.phase, attempts_address()) if stage.phase else contextlib.nullcontext()
    with failures, phase, _decks(stage) as pages:
        result = termination.run(call, pages)
        if not stage.asks:
            return result
        artifact = result if isinstance(result, Folder) else call.inputs["artifact"]
        return approval.asked(result, call.inputs["recipe"], artifact)


def _common(stage: Stage) -> dict[str, Any]:
    """Return the arguments of a task that light pods and shapes share."""
    arguments: dict[str, Any] = {
        "secret_requests": [secret for kind in stage.secrets for secret in secrets(kind)]
    }
    if stage.report:
        arguments |= {"enable_deck": True, "deck_fields": ()}
    if stage.cache:
        arguments["cache"] = Cache(version=stage.cache.version, ignored_inputs=stage.cache.ignored)
    return arguments


@contextmanager
def _decks(stage: Stage) -> Iterator[list[str]]:
    """Yield the list of a stage's pages, which become decks; flytekit itself leaves them out for a task that
    fails."""
    pages: list[str] = []
    try:
        yield pages
    except Exception:
        with contextlib.suppress(Exception):
            _show(stage, pages)
            if pages:
                Deck.publish()
        raise
    _show(stage, pages)


def _show(stage: Stage, pages: list[str]) -> None:
    for page in pages:
        Deck(stage.report, page)
