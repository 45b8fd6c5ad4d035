"""Stages in all processes or on all nodes of a shape as Flyte's tasks."""

import contextlib
import inspect
import os
import typing
from collections.abc import Callable
from typing import Any

import images
from flytune.hardware import Shape, load_shapes
from flytune.sharding import ONE_PROCESS
from flytune.stages.table import Stage
from tasks.runtime import face, forked_ranks, values
from tasks.runtime.elastic import ranks
from tasks.runtime.orchestrator import FLYTE
from tasks.runtime.pods import declare
from tasks.runtime.retries import report_failures


def on_ranks(stage: Stage, module: dict[str, Any]) -> dict[str, Any]:
    """Declare the tasks of a stage in all processes of each row of shapes.yaml; return them by route.

    A row with several processes is an Elastic (torchrun) task that classifies failures
    (tasks/runtime/elastic.py); on one node with GPUs it has a second task of one process, without Elastic.
    """
    on_ranks: dict[str, Any] = {}
    function, fetch = stage.load(), stage.load_fetch()
    assert fetch is not None
    kinds = typing.get_type_hints(function)

    def fetch_inputs(**inputs: Any) -> Any:
        given = {name: value for name, value in inputs.items() if name in inspect.signature(fetch).parameters}
        return fetch(FLYTE, **{name: values.to_stage(value, kinds[name]) for name, value in given.items()})

    def before(**inputs: Any) -> None:
        if FLYTE.is_local() and "RANK" not in os.environ:
            forked_ranks.prepare(fetch_inputs, **inputs)

    made, name = face.task_function(stage, function, module, report_failures, before), function.__name__
    common = {"container_image": images.TRAIN, **face.common(stage)}
    for shape in load_shapes():
        if shape.world_size > 1:
            config = ranks(shape, shape.processes, fetch_inputs)
            on_ranks[shape.name] = declare(
                made, f"{name}_{shape.identifier}", shape, module, task_config=config, **common
            )
        if shape.nodes == 1 and (shape.is_gpu or shape.processes == 1):
            route = shape.name + (ONE_PROCESS if shape.processes > 1 else "")
            on_ranks[route] = declare(made, f"{name}_{route.replace('-', '_')}", shape, module, **common)
    face.TASKS[stage.name] = on_ranks
    return on_ranks


def on_all_nodes(stage: Stage, module: dict[str, Any], on_several: Callable[..., Any]) -> dict[str, Any]:
    """Declare the tasks of a stage in one process of each node of a row; `on_several` is its function on
    several nodes."""

    def declared(shape: Shape) -> Any:
        several = shape.nodes > 1
        failures = report_failures if several else contextlib.nullcontext
        made = face.task_function(stage, on_several if several else stage.load(), module, failures)
        config = {"task_config": ranks(shape, processes=1)} if several else {}
        name = f"{stage.name}_{shape.identifier}"
        return declare(
            made, name, shape, module, container_image=images.TRAIN, **config, **face.common(stage)
        )

    face.TASKS[stage.name] = {shape.name: declared(shape) for shape in load_shapes()}
    return dict(face.TASKS[stage.name])
