"""The stages declared as Flyte 2's tasks: one for each row of the table, three for the kinds of input data;
and their calls."""

from collections.abc import Awaitable, Callable
from typing import Any

import flyte

from flyte2.runtime import pods
from flyte2.runtime.face import KEY, declare, declare_rows, environments
from flyte2.runtime.orchestrator import current
from flytune.hardware import shape_named
from flytune.stages import input_data, table
from flytune.stages.calls import row_of
from flytune.stages.table import Stage

TASKS = declare_rows(globals())
"""Tasks by the names of their stages."""
name_file = declare(table.INPUT_DATA, globals(), input_data.name_file)
name_folder = declare(table.INPUT_DATA, globals(), input_data.name_folder)
name_dataset = declare(table.INPUT_DATA, globals(), input_data.name_dataset)
TASKS[table.INPUT_DATA.name] = name_dataset
ENVIRONMENTS: list[flyte.Environment] = list(environments.values())
"""Environments of all tasks."""


def call(stage: Stage, key: str = "", **overrides: Any) -> Callable[..., Awaitable[Any]]:
    """Return the function that runs a stage's task: of one on a shape, on the row or route `key`.

    Raises:
        RecipeError: there is no such row.
    """
    task: Any = TASKS[stage.name]
    if key and current().is_local():
        # Machines are the pods' alone; attempts are here too.
        task = task.override(retries=shape_named(row_of(key)).retries)
    elif key:
        task = task.override(**pods.on_shape(stage, key), **overrides)

    async def run(**inputs: Any) -> Any:
        with flyte.custom_context(**{KEY: key}):
            return await task(**inputs)

    return run
