"""Stages of a run, called in the order of the table: each one takes the results that its row names."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from flyte.errors import OOMError

from flyte2 import approval
from flyte2.runtime import failures, pods
from flyte2.stages import call
from flytune.console import step_lines
from flytune.failures.table import OUT_OF_GPU_MEMORY, OUT_OF_HOST_MEMORY
from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.stages.planned import first_values
from flytune.stages.table import PLAN, REPORT, RUN, STORE, TRAIN, Phase, Stage


async def planned(recipe: Recipe, export_only: bool = False) -> dict[str, Any]:
    """Plan a recipe; return the values that a run begins with."""
    decided, harness_data = await call(PLAN)(recipe=recipe)
    return first_values(decided, harness_data, export_only)


async def wire(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """Run the phases of RUN with these names, all of them if none is named; return the values with their
    results."""
    for phase in RUN:
        if phase.name in names or not names:
            values = await run_phase(phase, values)
    if STORE.makes in values and values["recipe"].publish.approval is not None:
        await approval.outcome(values["recipe"], values[STORE.makes])
    return values


async def run_phase(phase: Phase, values: dict[str, Any]) -> dict[str, Any]:
    """Run the stages of a phase; return the values with their results."""
    for wave in phase.waves:
        for results in await asyncio.gather(*(_stage(stage, values) for stage in wave)):
            values = values | results
    return values


async def _stage(stage: Stage, values: dict[str, Any]) -> dict[str, Any]:
    if stage is TRAIN:
        return await _train(values)
    inputs = stage.taken(values)
    task = call(stage, values[stage.on] if stage.on else "")
    if not stage.over:
        return {stage.makes: await task(**inputs)}
    items = inputs.pop(stage.over)
    return {
        stage.makes: list(await asyncio.gather(*(task(**inputs, **{stage.over: item}) for item in items)))
    }


async def _train(values: dict[str, Any]) -> dict[str, Any]:
    """Train; where memory does not suffice, once more on the plan's next candidate."""
    try:
        return await _train_once(values)
    except OOMError as error:
        # Flyte's own code is that of a killed process.
        lack = OUT_OF_GPU_MEMORY if error.code == failures.OUT_OF_MEMORY else OUT_OF_HOST_MEMORY
        recipe, plan = values["recipe"], values["plan"]
        other = planner.next_candidate(recipe, plan)
        if other is None:
            raise
        planned_values = await planned(other, values["export_only"])
        instead = {name: planned_values[name] for name in ("route", "shape")}
        instead["plan"] = planner.adopted(plan, planned_values["plan"], lack)
        step_lines.show(f"{recipe.name}: {instead['plan'].reasons[-1]}")
        return instead | await _train_once(values | instead)


async def _train_once(values: dict[str, Any]) -> dict[str, Any]:
    bound = pods.deadline(values["recipe"], shape_named(values["plan"].shape))
    return {TRAIN.makes: await call(TRAIN, values["route"], timeout=bound)(**TRAIN.taken(values))}


@asynccontextmanager
async def reported(recipe: Recipe) -> AsyncIterator[None]:
    """Report the failure of the block's run, and raise it again."""
    try:
        yield
    except Exception as error:
        await call(REPORT)(recipe=recipe, err=str(error))
        raise
