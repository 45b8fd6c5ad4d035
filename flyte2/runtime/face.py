"""Stages as Flyte 2's tasks: a stage's function and its row of the table become the task of a module."""

import contextlib
from collections.abc import Callable
from typing import Any

import flyte
import flyte.report

from flyte2 import IS_POD
from flyte2.runtime import images, inputs, live, local, pods, schema, secrets, termination, values
from flyte2.runtime.failures import classified
from flyte2.runtime.file_systems import fsspec_s_own
from flyte2.runtime.orchestrator import current
from flytune.console import output
from flytune.stages import table
from flytune.stages.attempts import record_phase
from flytune.stages.calls import Call, StageResult, call_of
from flytune.stages.ranks import NoResult, StageFailed
from flytune.stages.table import Stage
from flytune.stages.value_types import as_function, hints_of

environments: dict[str, flyte.TaskEnvironment] = {}
"""Environments of the stages by their names: an environment has one image and one set of secrets."""
KEY = "flytune_shape"
"""Name of the row or route in the context of a call."""


def declare_rows(module: dict[str, Any]) -> dict[str, Any]:
    """Declare a task in a module for each row that has a function; return them by the names of the rows."""
    schema.register()  # before any interface is made
    output.install()
    inputs.install()
    if not IS_POD:
        local.install()
    return {row.name: declare(row, module, row.load()) for row in table.ROWS if row.function}


def declare(stage: Stage, module: dict[str, Any], function: Callable[..., Any]) -> Any:
    """Declare the task of a stage's function in a module."""
    kinds = hints_of(function)

    async def run(**inputs: Any) -> Any:
        given = {name: values.TYPES.to_stage(value, kinds[name]) for name, value in inputs.items()}
        call = call_of(stage, current(), given, flyte.get_custom_context().get(KEY, ""), function)
        with live.reported(call) if stage is table.TRAIN else contextlib.nullcontext(call) as shown_call:
            result = await _result_of(stage, shown_call)
        if stage.report and result.pages:
            await flyte.report.replace.aio(result.pages[-1], do_flush=True)
        with fsspec_s_own():
            return values.TYPES.from_stage(result.value, kinds["return"])

    name, signature = function.__name__, values.TYPES.signature(function)
    body = as_function(run, function, module["__name__"], name, signature)
    module[name] = _environment(stage).task(**_arguments(stage))(body)
    return module[name]


def _environment(stage: Stage) -> flyte.TaskEnvironment:
    if stage.name not in environments:
        environments[stage.name] = flyte.TaskEnvironment(
            name=f"flytune_{stage.name}",
            image=images.of(stage),
            secrets=list(secrets.of(stage)) or None,
            pod_template=pods.light(stage.requests) if stage.requests else None,
        )
    return environments[stage.name]


def _arguments(stage: Stage) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "retries": stage.retries,
        "report": bool(stage.report) or stage is table.TRAIN,
    }
    if stage.cache:
        # "auto" with a version: "override" would never read the cache of local runs.
        arguments["cache"] = flyte.Cache("auto", stage.cache.version, ignored_inputs=stage.cache.ignored)
    return arguments


async def _result_of(stage: Stage, call: Call) -> StageResult:
    """Return what a stage makes: in a pod in this process, in a local run in the worker."""
    with classified(stage.name, call.processes > 0):
        if call.orchestrator.is_local():
            return await local.run(call)
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
