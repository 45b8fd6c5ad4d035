"""Map tasks of a sweep whose elements, its points, may fail without failing the others.

Open-source Flyte maps over tasks only: flytepropeller reads a map over a launch plan as one call with lists.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flytekit import FlyteContextManager
from flytekit.core.array_node_map_task import ArrayNodeMapTask, ArrayNodeMapTaskResolver
from flytekit.core.base_task import IgnoreOutputs
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.tools.module_loader import load_object_from_module

from flytune.console import step_lines
from flytune.errors import FlytuneError
from flytune.stages import points
from flytune.stages.attempts import retries
from tasks.runtime import approval
from tasks.runtime.retries import RunFailed
from tasks.runtime.schema import without_schema


def map_points(
    task: Any, notes: str, allowed_failures: int, concurrency: int | None = None, titles: Sequence[str] = ()
) -> Any:
    """Map `task` over lists of its inputs; a failed element yields None and stores its reason (see
    flytune/stages/points.py).

    Args:
        notes: prefix of the addresses of the elements' reasons.
        allowed_failures: number of failures of a stage; once there are more, elements that have not begun are
            refused.
        concurrency: number of elements that run at a time; 0 for all; None for Flyte's limit of the workflow.
        titles: a line for each element, which a local run prints before it; a pod has one element, and prints
            none.
    """
    return without_schema(PointsTask(task, notes, allowed_failures, titles, concurrency=concurrency))


class PointsTask(ArrayNodeMapTask):
    """Map task that stores the reasons of failed elements, and refuses elements after too many failures."""

    def __init__(
        self, task: Any, notes: str, allowed_failures: int, titles: Sequence[str] = (), **arguments: Any
    ) -> None:
        # With a ratio of 0 all elements may fail, and flytekit types the results as optional.
        super().__init__(task, min_success_ratio=0.0, **arguments)
        self.notes, self.allowed_failures, self._titles = notes, allowed_failures, titles

    def get_command(self, settings: Any) -> list[str]:
        command: list[str] = super().get_command(settings)
        # Not the first `--`: under fast registration that is pyflyte-fast-execute's.
        resolver = command.index("--resolver") + 1
        start = command.index("--", resolver) + 1
        added = ["notes", self.notes, "allowed", str(self.allowed_failures)]
        return [
            *command[:resolver],
            PointsResolver().name(),
            *command[resolver + 1 : start],
            *added,
            *command[start:],
        ]

    def dispatch_execute(self, ctx: Any, input_literal_map: Any) -> Any:
        """Run one element in a pod, from its inputs to its outputs."""
        state = ctx.execution_state
        if state is None or state.is_local_execution():
            return super().dispatch_execute(ctx, input_literal_map)
        index = self._compute_array_job_index()
        try:
            try:
                self._refuse_if_too_many_failed()
            except FlytuneError as error:
                # Wrapped as an error of the task: flytekit calls errors outside the task recoverable.
                raise FlyteUserRuntimeException(error) from error
            with approval.without_questions():
                return super().dispatch_execute(ctx, input_literal_map)
        except Exception as error:
            # A pod without rank 0 raises IgnoreOutputs; flytekit wraps what a task raises.
            if not isinstance(getattr(error, "value", error), IgnoreOutputs):
                self._store_reason(index, error)
            raise

    def _raw_execute(self, **inputs: Any) -> list[Any]:
        """Run one element after the other on this machine."""
        outputs: list[Any] = []
        for index, values in enumerate(zip(*inputs.values(), strict=True)):
            for title in self._titles[index : index + 1]:
                step_lines.show(title)
            try:
                self._refuse_if_too_many_failed()
                with approval.without_questions():
                    outputs.append(self._run_task.execute(**dict(zip(inputs, values, strict=True))))
            except Exception as error:  # noqa: BLE001 (any error fails this point only)
                self._store_reason(index, error)
                outputs.append(None)
        return outputs

    def _refuse_if_too_many_failed(self) -> None:
        files = FlyteContextManager.current_context().file_access
        stage = self.notes.rpartition("/")[0]
        filesystem = files.get_filesystem_for_path(stage)
        failed = len(filesystem.ls(stage, detail=False)) if filesystem.exists(stage) else 0
        points.refuse(failed, self.allowed_failures)

    def _store_reason(self, index: int, error: Exception) -> None:
        cause = getattr(error, "value", None) or error
        is_last = int(os.environ.get("FLYTE_ATTEMPT_NUMBER", retries())) >= retries()
        if isinstance(cause, FlyteRecoverableException) and not is_last:
            return
        text = (
            str(cause) if isinstance(cause, FlytuneError | RunFailed) else f"{type(cause).__name__}: {cause}"
        )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "reason.txt")
            file.write_text(text, encoding="utf-8")
            FlyteContextManager.current_context().file_access.put_data(str(file), f"{self.notes}-{index}.txt")


class PointsResolver(ArrayNodeMapTaskResolver):
    """Resolver that loads the map task in a pod, with the address of its notes."""

    def name(self) -> str:
        return "tasks.runtime.mapping.PointsResolver"

    def load_task(self, loader_args: list[str], max_concurrency: int = 0) -> PointsTask:
        _, notes, _, allowed, _, _, _, resolver, *arguments = loader_args
        return PointsTask(
            load_object_from_module(resolver).load_task(loader_args=arguments), notes, int(allowed)
        )
