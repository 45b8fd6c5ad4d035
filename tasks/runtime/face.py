"""Stages as Flyte's tasks: a stage's function and its row of the table become the task of a module."""

import contextlib
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from flytekit import Cache, Deck, Resources, task
from flytekit.core.array_node_map_task import array_node_map_task
from flytekit.models.dynamic_job import DynamicJobSpec

import images
from flytune.hardware import load_cluster, load_shapes
from flytune.stages.orchestrator import Folder
from flytune.stages.table import Phase, Stage
from tasks.runtime import approval, interrupts, values
from tasks.runtime.orchestrator import FLYTE
from tasks.runtime.pods import declare, light_pod
from tasks.runtime.retries import classify_failures, record_phase
from tasks.runtime.schema import without_schema
from tasks.runtime.secrets import secrets

TASKS: dict[str, Any] = {}
"""Declared tasks by the names of their stages; of a stage on shapes, a dict by the keys of the shapes."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {}
PLAN_IMAGE = images.TRAIN if load_cluster().plan_in_training_image else images.LIGHT
"""Image of the tasks that plan."""
OWN = ("orchestrator", "report")
"""Parameters of stages that are not inputs."""


def light(stage: Stage, module: dict[str, Any], function: Callable[..., Any] | None = None) -> Any:
    """Declare the task of a stage in a light pod; `function` is given where the row has several."""
    limits = {"limits": _resources(stage)} if stage.requests and stage.requests.is_limit else {}
    made = task(
        container_image=PLAN_IMAGE if stage.place == "plan" else images.LIGHT,
        # A stage that asks registers the tasks of the answer, by the images' names.
        pod_template=light_pod(images.environment) if stage.asks else light_pod(),
        retries=stage.retries,
        requests=_resources(stage),
        **limits,
        **common(stage),
    )(
        task_function(
            stage,
            function or stage.load(),
            module,
            classify_failures if stage.retries else contextlib.nullcontext,
        )
    )
    TASKS[stage.name] = without_schema(made)
    return TASKS[stage.name]


def on_nodes(stage: Stage, module: dict[str, Any], per_item: str = "") -> dict[str, Any]:
    """Declare the tasks of a stage on one node of each row of shapes.yaml; return them by the rows' names.

    With `per_item` they are map tasks over that input.
    """
    function = stage.load()
    made, name = task_function(stage, function, module, classify_failures), function.__name__
    on_nodes = {
        shape.name: declare(
            made,
            f"{name}_{shape.identifier}",
            shape.one_node,
            module,
            container_image=images.TRAIN,
            **common(stage),
        )
        for shape in load_shapes()
    }
    if per_item:
        shared = set(inspect.signature(made).parameters) - {per_item}
        on_nodes = {
            key: without_schema(array_node_map_task(one, bound_inputs=shared))
            for key, one in on_nodes.items()
        }
    TASKS[stage.name] = on_nodes
    return on_nodes


def declare_run(phases: Iterable[Phase], module: dict[str, Any]) -> None:
    """Declare the stages of a run; one without a module of tasks/ gets its tasks in `module`.

    The others keep theirs: their tasks are registered, and their results are cached, under its name.
    """
    own = {path.stem for path in Path(module["__file__"]).parent.glob("*.py")}
    for stage in [stage for phase in phases for stage in phase.stages]:
        if stage.name in own:
            import_module(f"{module['__package__']}.{stage.name}")
        elif stage.place == "node":
            on_nodes(stage, module)
        else:
            module[stage.function.partition(".")[2]] = light(stage, module)


def task_function(
    stage: Stage,
    function: Callable[..., Any],
    module: dict[str, Any],
    failures: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    before: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return a stage's function with Flyte's types, in a module of tasks.

    Args:
        failures: context in which the stage's errors are raised as recoverable or final.
        before: function that gets Flyte's inputs before the stage.
    """
    _FUNCTIONS[stage.name] = function
    kinds = kinds_of(stage)
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in OWN
    ]
    result = values.output_type(kinds["return"], stage.has_separate_fields)

    def run(**inputs: Any) -> Any:
        given = {name: values.to_stage(value, kinds[name]) for name, value in inputs.items()}
        if "recipe" in inputs:
            interrupts.note(inputs["recipe"])
        phase = record_phase(stage.phase) if stage.phase else contextlib.nullcontext()
        with failures(), phase, _report(stage) as report:
            if before is not None:
                before(**inputs)
            own = {"orchestrator": FLYTE, "report": report}
            made = function(**{name: one for name, one in own.items() if name in kinds}, **given)
            if stage.asks:
                made = approval.asked(
                    made, given["recipe"], made if isinstance(made, Folder) else given["artifact"]
                )
                if isinstance(made, DynamicJobSpec):
                    if stage.report:
                        Deck.publish()  # flytekit leaves out the decks of such a task
                    return made
        return values.output(made, kinds["return"], result)

    types = {parameter.name: values.flyte_type(kinds[parameter.name]) for parameter in parameters}
    shown = [parameter.replace(annotation=types[parameter.name]) for parameter in parameters]
    return as_task_function(
        run, function, module, function.__name__, inspect.Signature(shown, return_annotation=result)
    )


def function_of(stage: Stage) -> Callable[..., Any]:
    """Return the function of a declared stage."""
    return _FUNCTIONS[stage.name]


def kinds_of(stage: Stage) -> dict[str, Any]:
    """Return the types of the inputs and of the result of a declared stage."""
    return typing.get_type_hints(function_of(stage), include_extras=True)


def as_task_function(
    run: Callable[..., Any],
    of: Callable[..., Any],
    module: dict[str, Any],
    name: str,
    signature: inspect.Signature,
) -> Callable[..., Any]:
    """Return `run` as the function of a task of a module: flytekit takes no inner function, unless it wraps
    an outer one."""
    run.__name__ = run.__qualname__ = name
    run.__module__, run.__doc__ = module["__name__"], of.__doc__
    run.__annotations__ = {
        parameter.name: parameter.annotation for parameter in signature.parameters.values()
    }
    run.__annotations__["return"] = signature.return_annotation
    run.__dict__ |= {"__wrapped__": of, "__signature__": signature}
    return run


def _resources(stage: Stage) -> Resources:
    assert stage.requests is not None
    disk = stage.requests.disk_gib
    return Resources(
        cpu=str(stage.requests.cpu),
        mem=f"{stage.requests.memory_gib}Gi",
        ephemeral_storage=None if disk is None else f"{disk}Gi",
    )


def common(stage: Stage) -> dict[str, Any]:
    """Return the arguments of a task that light pods and shapes share."""
    found: dict[str, Any] = {
        "secret_requests": [secret for kind in stage.secrets for secret in secrets(kind)]
    }
    if stage.report:
        found |= {"enable_deck": True, "deck_fields": ()}
    if stage.cache:
        found["cache"] = Cache(version=stage.cache.version, ignored_inputs=stage.cache.ignored)
    return found


@contextmanager
def _report(stage: Stage) -> Iterator[Callable[[str], None]]:
    """Yield the function that shows the stage's page as a deck, which Flyte itself leaves out for a task that
    fails."""
    shown: list[str] = []

    def show(html: str) -> None:
        shown.append(html)
        Deck(stage.report, html)

    try:
        yield show
    except Exception:
        if shown:
            with contextlib.suppress(Exception):
                Deck.publish()
        raise
