"""Calls of stages: a stage's function with its inputs, which a pod or a process of this machine runs."""

import contextlib
import inspect
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from flytune.hardware import Shape, devices, shape_named
from flytune.recipe import Recipe
from flytune.records import Plan
from flytune.records.training import LIVE
from flytune.sharding import ONE_PROCESS
from flytune.stages import ranks
from flytune.stages.orchestrator import Orchestrator
from flytune.stages.stored import show_saved
from flytune.stages.table import SELFTEST, Stage
from flytune.stages.worker import Worker
from flytune.training import libraries

INTERRUPTED = 130
"""Exit code of a process that a Ctrl-C ends: 128 and the number of SIGINT, as in a shell."""


class StageResult(NamedTuple):
    """Result of a stage, and the pages that it has shown."""

    value: Any
    pages: list[str]


@dataclass(frozen=True)
class Call:
    """A stage's function with its inputs. It can be pickled."""

    function: Callable[..., Any]
    orchestrator: Orchestrator
    inputs: Mapping[str, Any]
    shape: Shape | None = None
    """Machines of the stage; None of one in a light pod."""
    processes: int = 0
    """Most ranks of a node that are started; 0 if this process is the only one."""
    fetch: Callable[..., Any] | None = None
    """Function that brings the inputs of a stage that trains to the node, once for all ranks."""
    live: str = ""
    """File that gets the path of the steps' log while the stage trains; empty where nobody looks."""

    def run(self, pages: list[str] | None = None) -> StageResult:
        """Run the stage in this process, or in ranks that this process starts.

        Args:
            pages: list that gets the pages, for a caller who shows those of a stage that fails.

        Raises:
            StageFailed: a rank has failed. Errors of a stage without ranks are raised as they are.
            NoResult: another node has the result.
            SystemExit: a Ctrl-C, after what is saved was said.
        """
        pages = [] if pages is None else pages
        try:
            return self._run(pages)
        except KeyboardInterrupt:
            recipe = self.inputs.get("recipe")
            is_saved = self.orchestrator.is_local() and isinstance(recipe, Recipe)
            end_interrupted(self.orchestrator, recipe if is_saved else None)

    def _run(self, pages: list[str]) -> StageResult:
        if self.live:
            os.environ[LIVE] = self.live
        else:
            os.environ.pop(LIVE, None)
        processes = self._ranks()
        if self.shape is not None and not processes:
            check_devices(self.shape)
        forks = self.fetch is not None and ranks.prepare(self.orchestrator, self._fetched, **self.inputs)
        given = {"orchestrator": self.orchestrator, **self.inputs}
        if not processes:
            return _with_pages(self.function, given, pages)
        assert self.shape is not None
        rank = {"function": self.function, "given": given, "pages": pages}
        result: StageResult = ranks.start(_with_pages, self.shape.nodes, processes, forks, rank)
        pages += result.pages
        return result

    def _ranks(self) -> int:
        """Return the number of ranks of a node: those of the plan, where GPUs of a node do not train."""
        plan = self.inputs.get("plan")
        return min(self.processes, plan.processes) if isinstance(plan, Plan) else self.processes

    def _fetched(self, **inputs: Any) -> Any:
        assert self.fetch is not None
        taken = inspect.signature(self.fetch).parameters
        return self.fetch(
            self.orchestrator, **{name: value for name, value in inputs.items() if name in taken}
        )


def _with_pages(function: Callable[..., Any], given: Mapping[str, Any], pages: list[str]) -> StageResult:
    """Return what a stage's function makes in this process of what it takes, with its pages."""
    known = {"report": pages.append, **given}
    taken = inspect.signature(function).parameters
    return StageResult(function(**{name: known[name] for name in known if name in taken}), pages)


def call_of(
    stage: Stage,
    orchestrator: Orchestrator,
    inputs: Mapping[str, Any],
    key: str,
    function: Callable[..., Any] | None,
) -> Call:
    """Return the call of a stage.

    Args:
        stage: row of the table.
        orchestrator: the system that runs it.
        inputs: its inputs.
        key: row of shapes.yaml, or the route, of a stage on a shape.
        function: its function, where the row has several.
    """
    shape = shape_named(row_of(key)) if key else None
    processes = processes_of(stage, key) if key else 0
    return Call(function or stage.load(), orchestrator, inputs, shape, processes, stage.load_fetch())


def row_of(key: str) -> str:
    """Return the name of the row of shapes.yaml of a route."""
    return key.removesuffix(ONE_PROCESS)


def processes_of(stage: Stage, key: str) -> int:
    """Return the number of ranks that a stage starts on a node of a row or route; 0 where its process is the
    only one."""
    shape = shape_named(row_of(key))
    if stage.place != "shape" or shape.world_size == 1 or key.endswith(ONE_PROCESS):
        return 0
    return int(shape.nodes > 1) if stage is SELFTEST else shape.processes


class _State:
    """State of this process."""

    has_said = False
    """True once a Ctrl-C has said what is saved."""


def end_interrupted(orchestrator: Orchestrator, recipe: Recipe | None) -> NoReturn:
    """End this process at a Ctrl-C, with its workers, after it was said what is saved of a recipe's run.

    Raises:
        SystemExit: always.
    """
    if recipe is not None and not _State.has_said:
        # A second Ctrl-C ends what the first one waits for.
        _State.has_said = True
        show_saved(orchestrator, recipe, "Ctrl-C")
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            child.kill()
    raise SystemExit(INTERRUPTED) from None


def leave(
    worker: Worker, number: int, orchestrator: Orchestrator, recipe: Recipe | None, stage_has_recipe: bool
) -> NoReturn:
    """End a local run by a signal: let the worker save, say what is saved, and leave.

    Args:
        worker: the process in which the run's stages are.
        number: the signal. A terminal sends Ctrl-C to the worker, too.
        orchestrator: that of the run.
        recipe: the newest one of a stage; None if nothing can be saved.
        stage_has_recipe: True if it is that of the stage in the worker, which says at a Ctrl-C itself what is
            saved, unless it has just ended or not begun.

    Raises:
        SystemExit: always.
    """
    is_ctrl_c = number == signal.SIGINT
    worker.stop(None if is_ctrl_c else number)
    worker_has_said = is_ctrl_c and stage_has_recipe and worker.exit_code == INTERRUPTED
    if recipe is not None and not worker_has_said:
        show_saved(orchestrator, recipe, "Ctrl-C" if is_ctrl_c else "SIGTERM")
    raise SystemExit(128 + number)


def check_devices(shape: Shape) -> None:
    """Compare the node's GPUs with the row, before anything is fetched or a model is loaded.

    In another process: one that has used CUDA cannot be forked, and the self-test forks its ranks. One that
    has used it already, as that of a local run that has trained, looks itself.

    Raises:
        DeviceError: they are others.
    """
    if shape.is_gpu:
        devices.configure_allocator()
        if not libraries.can_fork():
            devices.check(shape)
            return
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
            executor.submit(devices.check, shape).result()
