"""Environment of the tasks that call stages, which are Flyte 2's workflows: they wait, and need no more than
the SDK."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import flyte

from flyte2.runtime import images, pods, values
from flyte2.stages import ENVIRONMENTS
from flytune.stages.declared import as_workflow
from flytune.stages.table import Resources

driver = flyte.TaskEnvironment(
    name="flytune",
    image=images.light(),
    pod_template=pods.light(Resources(1, 2)),
    depends_on=ENVIRONMENTS,
)


def workflow(body: Callable[..., Awaitable[Any]]) -> Any:
    """Declare the task of a workflow that flytune/stages/declared.py declares."""

    @functools.wraps(body)
    async def run(**inputs: Any) -> Any:
        given = inspect.signature(run).bind(**inputs)
        given.apply_defaults()
        return await body(**given.arguments)

    return driver.task(as_workflow(run, values.TYPES))
