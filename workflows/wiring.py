"""Stages of a run, wired by the table: each one takes the results that its row names."""

from collections.abc import Iterable
from typing import Any

from flytune.stages.planned import first_values
from flytune.stages.table import RUN, Stage
from tasks.run import TASKS
from workflows.routing import map_on, route_to


def values_of(planned: Any, export_only: bool = False) -> dict[str, Any]:
    """Return the values that a run begins with: outputs of the plan task, with the recipe as the plan has
    completed it."""
    return first_values(planned, planned.harness_data, export_only)


def wire(stages: Iterable[Stage], values: dict[str, Any]) -> dict[str, Any]:
    """Run stages in their order; return the values with their results."""
    for stage in stages:
        values = values | {stage.makes: _run(stage, values)}
    return values


def _run(stage: Stage, values: dict[str, Any]) -> Any:
    tasks, inputs = TASKS[stage.name], stage.taken(values)
    if not stage.on:
        return tasks(**inputs)
    if not stage.over:
        return route_to(stage.name, values[stage.on], tasks, **inputs)
    over = {stage.over: inputs.pop(stage.over)}
    return map_on(stage.name, values[stage.on], tasks, over, **inputs)


def stages_of(*phases: str) -> list[Stage]:
    """Return the stages of phases of RUN, of all of them if none is named."""
    return [stage for phase in RUN for stage in phase.stages if phase.name in phases or not phases]
