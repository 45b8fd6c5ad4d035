"""Stages as Flyte 2's tasks: a stage's function and its row of the table become the task of a module."""

import contextlib
import inspect
import typing
from collections.abc import Awaitable, Callable
from typing import Any

import flyte
import flyte.report

from flyte2 import IS_POD
from flyte2.runtime import images, inputs, live, local, pods, schema, secrets, termination, values
from flyte2.runtime.failures import classified
from flyte2.runtime.file_systems import fsspec_s_own
from flyte2.runtime.orchestrator import current
from flytune.console import output
from flytune.hardware import shape_named
from flytune.stages.attempts import record_phase
from flytune.stages.calls import OWN, Call, StageResult, processes_of, row_of
from flytune.stages.ranks import NoResult, StageFailed
from flytune.stages.table import TRAIN, Stage

TASKS: dict[str, Any] = {}
"""Declared tasks by the names of their stages."""
FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""Functions of the stages by their names."""
ENVIRONMENTS: dict[str, flyte.TaskEnvironment] = {}
"""Environments of the stages by their names: an environment has one image and one set of secrets."""
_KEY = "flytune_shape"
"""Name of the row or route in the context of a call."""

assert schema, "its transformer is registered before any interface is made"
output.install()
inputs.install()
if not IS_POD:
    local.install()


def declare(
    stage: Stage,
    module: dict[str, Any],
    function: Callable[..., Any] | None = None,
    on_several: Callable[..., Any] | None = None,
) -> Any:
    """Declare the task of a stage in a module.

    Args:
        function: the stage's function, where its row has several.
        on_several: the stage's function on several nodes, if it is another.
    """
    function = function or stage.load()
    FUNCTIONS[stage.name] = function
    kinds = typing.get_type_hints(function, include_extras=True)
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name not in OWN]

    async def run(**inputs: Any) -> Any:
        orchestrator, key = current(), flyte.get_custom_context().get(_KEY, "")
        given = {name: values.to_stage(value, kinds[name]) for name, value in inputs.items()}
        shape = shape_named(row_of(key)) if key and stage.place in ("node", "shape") else None
        processes = processes_of(stage, key) if shape else 0
        own = on_several if on_several is not None and processes else function
        call = Call(own, orchestrator, given, shape, processes, stage.load_fetch())
        with live.reported(call) if stage is TRAIN else contextlib.nullcontext(call) as shown_call:
            made = await _made(stage, shown_call)
        if stage.report and made.pages:
            await flyte.report.replace.aio(made.pages[-1], do_flush=True)
        with fsspec_s_own():
            return values.to_flyte(orchestrator, made.value, kinds["return"])

    shown = [one.replace(annotation=values.flyte_type(kinds[one.name])) for one in parameters]
    signature = inspect.Signature(shown, return_annotation=values.flyte_type(kinds["return"]))
    task = _environment(stage).task(**_arguments(stage))(_as_function(run, function, module, signature))
    TASKS[stage.name] = module[function.__name__] = task
    return task


def _environment(stage: Stage) -> flyte.TaskEnvironment:
    if stage.name not in ENVIRONMENTS:
        ENVIRONMENTS[stage.name] = flyte.TaskEnvironment(
            name=f"flytune_{stage.name}",
            image=images.of(stage),
            secrets=list(secrets.of(stage)) or None,
            pod_template=pods.light(stage.requests) if stage.requests else None,
        )
    return ENVIRONMENTS[stage.name]


def _arguments(stage: Stage) -> dict[str, Any]:
    found: dict[str, Any] = {"retries": stage.retries, "report": bool(stage.report) or stage is TRAIN}
    if stage.cache:
        # "auto" with a version: "override" would never read the cache of local runs.
        found["cache"] = flyte.Cache("auto", stage.cache.version, ignored_inputs=stage.cache.ignored)
    return found


def _as_function(
    run: Any, of: Callable[..., Any], module: dict[str, Any], signature: inspect.Signature
) -> Any:
    """Return `run` as a function of a module of tasks: a pod loads its task by the module and the function's
    name."""
    run.__name__ = run.__qualname__ = of.__name__
    run.__module__, run.__doc__ = module["__name__"], of.__doc__
    run.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
    run.__annotations__["return"] = signature.return_annotation
    run.__signature__ = signature
    return run


async def _made(stage: Stage, call: Call) -> StageResult:
    """Return what a stage makes: in a pod in this process, in a local run in the worker."""
    with classified(stage.name, call.processes > 0):
        if call.orchestrator.is_local():
            return await local.made(call)
        with (
            record_phase(stage.phase, current().attempts_address())
            if stage.phase
            else contextlib.nullcontext()
        ):
            return _in_pod(call)


def _in_pod(call: Call) -> StageResult:
    """Return what a stage makes in this pod, which may be one of several."""
    try:
        with fsspec_s_own():
            return call.run()
    except NoResult:
        plan = call.inputs.get("plan")
        # Exported parameters have four bytes at most.
        termination.end_after_rank_0(4 * plan.trained_parameters if plan else 0)
    except StageFailed as error:
        if error.failure.notices and call.shape is not None and call.shape.nodes > 1:
            termination.leave_to_another()
        raise


def call(stage: Stage, key: str = "", **overrides: Any) -> Callable[..., Awaitable[Any]]:
    """Return the function that runs a stage's task: of one on a shape, on the row or route `key`.

    Raises:
        RecipeError: there is no such row.
    """
    task = TASKS[stage.name]
    if not key:
        return typing.cast(Callable[..., Awaitable[Any]], task)
    if current().is_local():
        # Machines are the pods' alone; attempts are here too.
        task = task.override(retries=shape_named(row_of(key)).retries)
    else:
        task = task.override(**pods.on_shape(stage, key), **overrides)

    async def run(**inputs: Any) -> Any:
        with flyte.custom_context(**{_KEY: key}):
            return await task(**inputs)

    return run
