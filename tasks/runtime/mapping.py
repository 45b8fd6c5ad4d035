"""A task mapped over points that may fail, each one and all of them, without failing the others.

Open-source Flyte maps over tasks alone: flytepropeller reads a map over a launch plan as one call with lists.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from flytekit import FlyteContextManager
from flytekit.core.array_node_map_task import ArrayNodeMapTask, ArrayNodeMapTaskResolver
from flytekit.core.base_task import IgnoreOutputs
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.tools.module_loader import load_object_from_module

from flytune.errors import FlytuneError
from flytune.failures.table import RETRIES
from tasks.runtime.retries import RunFailed
from tasks.runtime.schema import trimmed


def mapped(task: Any, notes: str, spare: int, concurrency: int | None = None) -> Any:
    """Map `task` over lists of its inputs; None where it has failed, and the reason below `notes` (see `reason`).

    Args:
        spare: once so many and one more have left their reasons beside `notes`, no further one does its work.
        concurrency: how many run at a time; 0 for all; None for as many as Flyte runs of a workflow.
    """
    return trimmed(_Points(task, notes, spare, concurrency=concurrency))


def reason(notes: str, index: int) -> str:
    """Return why the element of a map task has failed; empty where it could not say, as when its pod was killed."""
    files = FlyteContextManager.current_context().file_access
    if not files.exists(address := f"{notes}-{index}.txt"):
        return ""
    with tempfile.TemporaryDirectory() as folder:
        files.get_data(address, f"{folder}/reason.txt")
        return Path(folder, "reason.txt").read_text(encoding="utf-8")


class _Points(ArrayNodeMapTask):
    def __init__(self, task: Any, notes: str, spare: int, **arguments: Any) -> None:
        # A ratio of 0: all may fail, and flytekit allows for None.
        super().__init__(task, min_success_ratio=0.0, **arguments)
        self.notes, self.spare = notes, spare

    def get_command(self, settings: Any) -> list[str]:
        command: list[str] = super().get_command(settings)
        command[command.index("--resolver") + 1] = PointsResolver().name()
        own = command.index("--") + 1
        return [*command[:own], "notes", self.notes, "spare", str(self.spare), *command[own:]]

    def dispatch_execute(self, ctx: Any, input_literal_map: Any) -> Any:
        """Run one element in a pod: inputs, execution and outputs."""
        state = ctx.execution_state
        if state is None or state.is_local_execution():
            return super().dispatch_execute(ctx, input_literal_map)
        index = self._compute_array_job_index()
        try:
            try:
                self._refuse_what_is_hopeless()
            except FlytuneError as error:
                # As what a task raises: flytekit calls errors around it recoverable.
                raise FlyteUserRuntimeException(error) from error
            return super().dispatch_execute(ctx, input_literal_map)
        except Exception as error:
            # Of a pod without rank 0; flytekit wraps what a task raises.
            if not isinstance(getattr(error, "value", error), IgnoreOutputs):
                self._note(index, error)
            raise

    def _raw_execute(self, **inputs: Any) -> list[Any]:
        """Run one element after the other on this machine."""
        made: list[Any] = []
        for index, values in enumerate(zip(*inputs.values(), strict=True)):
            try:
                self._refuse_what_is_hopeless()
                made.append(self._run_task.execute(**dict(zip(inputs, values, strict=True))))
            except Exception as error:  # noqa: BLE001 (whatever it is, it costs this point alone)
                self._note(index, error)
                made.append(None)
        return made

    def _refuse_what_is_hopeless(self) -> None:
        files = FlyteContextManager.current_context().file_access
        stage = self.notes.rpartition("/")[0]
        filesystem = files.get_filesystem_for_path(stage)
        failed = len(filesystem.ls(stage, detail=False)) if filesystem.exists(stage) else 0
        if failed > self.spare:
            raise FlytuneError(f"not run: {failed} points had failed, and {self.spare} may (min_success_ratio)")

    def _note(self, index: int, error: Exception) -> None:
        cause = getattr(error, "value", None) or error
        is_last = int(os.environ.get("FLYTE_ATTEMPT_NUMBER", RETRIES)) >= RETRIES
        if isinstance(cause, FlyteRecoverableException) and not is_last:
            return
        text = str(cause) if isinstance(cause, FlytuneError | RunFailed) else f"{type(cause).__name__}: {cause}"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "reason.txt")
            file.write_text(text, encoding="utf-8")
            FlyteContextManager.current_context().file_access.put_data(str(file), f"{self.notes}-{index}.txt")


class PointsResolver(ArrayNodeMapTaskResolver):
    """Resolver that finds the map task in a pod, with its notes' address."""

    def name(self) -> str:
        return "tasks.runtime.mapping.PointsResolver"

    def load_task(self, loader_args: list[str], max_concurrency: int = 0) -> _Points:
        _, notes, _, spare, _, _, _, resolver, *arguments = loader_args
        return _Points(load_object_from_module(resolver).load_task(loader_args=arguments), notes, int(spare))
