"""A run on this machine, without Flyte: the stages of the table, one after the other, in a worker process.

`run` is a whole run, from a recipe to its artifact; `sweep` is one for each point. What a run prepares stays
in a cache, by the keys that Flyte caches it by; what it trains stays in the checkpoints; the artifact stays
where the recipe says, or in the folder of results.
"""

import getpass
import hashlib
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytune import caches, process_setup
from flytune.console import step_lines
from flytune.errors import FlytuneError
from flytune.failures import FailureText, reports
from flytune.files import written_atomically
from flytune.recipe import Recipe
from flytune.records.contents import Contents, list_files
from flytune.registry import approval
from flytune.schema import RecordError
from flytune.stages import attempts, points, prepare, table
from flytune.stages.calls import StageResult, call_of, leave
from flytune.stages.orchestrator import Failed, Folder
from flytune.stages.planned import Run, Running, first_values
from flytune.stages.ranks import StageFailed
from flytune.stages.table import Stage
from flytune.stages.worker import Worker

log = logging.getLogger(__name__)

_CACHED = (table.PREPARE, table.REFERENCE)
"""Stages whose results stay on this machine. The base model is in the hub's own cache."""
_CONTENT, _LIST = "content", "files.json"
"""Parts of a cached result: its folder, and the hashes of its files."""


@dataclass(frozen=True)
class ThisMachine:
    """The orchestrator of a local run: folders below one root. It can be pickled."""

    root: Path

    def fetch(self, address: str, target: Path, is_folder: bool = False) -> None:
        if is_folder:
            shutil.copytree(address, target, dirs_exist_ok=True)
        else:
            shutil.copy(address, target)

    def store(self, path: Path, address: str) -> str:
        if path.is_dir():
            shutil.copytree(path, address)
        else:
            shutil.copy(path, address)
        return address

    def new_address(self) -> str:
        """Return an address where nothing is stored yet."""
        return str(self.new_folder() / "stored")

    def new_folder(self) -> Path:
        """Create an empty folder."""
        return Path(tempfile.mkdtemp(dir=self.root))

    def shared_address(self, name: str) -> str | None:
        """Return None: attempts share the folders that the recipe names."""
        return None

    def execution(self) -> str:
        """Return no identifier."""
        return ""

    def is_local(self) -> bool:
        """Return True."""
        return True

    def runs_on_declared_rows(self) -> bool:
        """Return False."""
        return False


class RunFailure(FlytuneError):
    """Failure of a run's stage, in the words of the table of failures."""

    def __init__(self, text: FailureText) -> None:
        super().__init__(str(text))
        self.text = text


def run(recipe: Recipe) -> str:
    """Run a recipe on this machine; return the address of its artifact.

    Raises:
        FlytuneError: a stage has failed; the failure was reported as the recipe asks for.
        SystemExit: Ctrl-C or SIGTERM, after what is saved was said.
    """
    with _machine() as machine:
        try:
            values = machine.plan(recipe)
            for phase in table.RUN:
                for stage in phase.stages:
                    values[stage.makes] = machine.call_in_run(stage, values)
            machine.ask(recipe, values[table.STORE.makes])
        except FlytuneError as error:
            machine.report(recipe, error)
            raise
        return machine.kept(values[table.STORE.makes])


def sweep(
    recipe: Recipe, grid: Mapping[str, Any], changes: list[Mapping[str, Any]], max_points: int = 24
) -> str:
    """Run each point of a sweep on this machine, one after the other; return the address of the comparison.

    Args:
        recipe: recipe that the points change.
        grid: dotted field -> list of values, for all combinations.
        changes: or, for each point, dotted field -> value.
        max_points: largest number of points.

    Raises:
        FlytuneError: the points are refused, or too few have succeeded; failures were reported as the recipe
            asks for.
        SystemExit: Ctrl-C or SIGTERM, after what is saved was said.
    """
    asked: dict[str, Any] = {"recipe": recipe, "grid": grid, "changes": changes, "max_points": max_points}
    with _machine() as machine:
        try:
            drawn, running = machine.call(table.DRAW, concurrency=1, min_success_ratio=0.5, **asked)
            results: dict[str, dict[str, Any] | str] = {}
            artifacts: list[Folder] = []
            for point in running.runs:
                try:
                    values = machine.run_point(running, point, results)
                except FlytuneError as error:
                    results[point.recipe.name] = str(error)
                else:
                    artifacts.append(values.pop(table.STORE.makes))
                    results[point.recipe.name] = {name: points.kept(value) for name, value in values.items()}
            after = running.after(results)
            compared = machine.call(
                table.COMPARE_POINTS, points=drawn, running=after, artifact=[artifacts] if artifacts else []
            )
        except FlytuneError as error:
            machine.report(recipe, error)
            raise
        return machine.kept(compared)


class _Machine:
    """The worker of a run, and the folders in which its stages write."""

    def __init__(self, root: Path) -> None:
        self.orchestrator = ThisMachine(root)
        self.worker = Worker()
        self.recipe: Recipe | None = None
        """Recipe of the stage in the worker, or of the last one that had one."""
        self.stage_has_recipe = False
        self.is_ending = False
        self.has_result = False
        """True if the result of the run is below the root."""

    def plan(self, recipe: Recipe) -> dict[str, Any]:
        """Plan a recipe; return the values that a run begins with."""
        return first_values(*self.call(table.PLAN, recipe=recipe))

    def run_point(self, running: Running, point: Run, results: Mapping[str, Any]) -> dict[str, Any]:
        """Run a planned point of a sweep; return what its stages have made."""
        failed = sum(isinstance(result, str) for result in results.values())
        points.refuse(failed, running.spare)
        step_lines.show(running.titles([point])[0])
        values = point.made | first_values(point, Folder.here(Path(point.made["harness_data"])))
        of_point: dict[str, Any] = {}
        for phase in table.RUN:
            for stage in phase.stages:
                of_point[stage.makes] = self.call_in_run(stage, values | of_point)
        approval.show_command(of_point[table.STORE.makes].address, point.recipe)
        return of_point

    def call_in_run(self, stage: Stage, values: Mapping[str, Any]) -> Any:
        """Return what a stage of a run makes of the run's values: one result, or one for each item of its
        list."""
        inputs = stage.taken(values)
        key = values[stage.on] if stage.on else ""
        if not stage.over:
            return self.call(stage, key, **inputs)
        items = inputs.pop(stage.over)
        return [self.call(stage, key, **inputs, **{stage.over: item}) for item in items]

    def call(self, stage: Stage, key: str = "", **inputs: Any) -> Any:
        """Return what a stage makes, or has made of equal inputs before.

        Args:
            stage: row of the table.
            key: row of shapes.yaml, or the route, of a stage on a shape.
            inputs: its inputs.
        """
        if stage not in _CACHED:
            return self._call(stage, key, inputs)
        folder = caches.hub_folder("prepared") / f"{stage.name}-{_digest(stage, inputs)}"
        if folder.exists() and not _is_whole(folder):
            log.warning("%s: is damaged, and is made again", folder)
            shutil.rmtree(folder)
        if not folder.exists():
            result = self._call(stage, key, inputs)
            with written_atomically(folder, keep_existing=True) as temporary:
                temporary.mkdir()
                shutil.move(result.path, temporary / _CONTENT)
                Contents(files=list_files(temporary / _CONTENT)).write(temporary / _LIST)
        return Folder.here(folder / _CONTENT)

    def ask(self, recipe: Recipe, artifact: Folder) -> None:
        """Ask in the terminal what a recipe with publish.approval asks about its artifact; publish it after a
        yes.

        Where nobody can be asked, the command that approves it is shown.
        """
        question = approval.pending(artifact.address) if recipe.publish.approval else None
        if question is None:
            return
        # The artifact is stored: a Ctrl-C here loses nothing.
        self.recipe = None
        answer = approval.answer_here(question, artifact.address)
        if answer is not None:
            about: dict[str, Any] = {
                "recipe": recipe,
                "artifact": artifact,
                "sha256": question.artifact_sha256,
            }
            self.call(table.ANSWER, **about, answer=answer, by=getpass.getuser())

    def report(self, recipe: Recipe, error: FlytuneError) -> None:
        """Report a failure on this machine and to the recipe's webhook."""
        text = error.text if isinstance(error, RunFailure) else FailureText(str(error), "")
        self._call(table.REPORT, "", {"recipe": recipe, "err": Failed(text)})

    def kept(self, stored: Folder) -> str:
        """Return the address of a result; where it is below the root, the root stays."""
        self.has_result = Path(stored.address).is_relative_to(self.orchestrator.root)
        return stored.address

    def _call(self, stage: Stage, key: str, inputs: Mapping[str, Any]) -> Any:
        recipe = inputs.get("recipe")
        self.stage_has_recipe = isinstance(recipe, Recipe)
        if isinstance(recipe, Recipe):
            self.recipe = recipe
        # The main thread waits where a signal can interrupt it.
        with ThreadPoolExecutor(1) as executor:
            called = executor.submit(
                self.worker.call, in_worker, self.orchestrator, stage.name, key, dict(inputs)
            )
            try:
                result = called.result()
            except StageFailed as failed:
                is_alone = stage.place != "shape"
                raise RunFailure(attempts.text_of(failed.failure, is_alone)) from None
        if isinstance(result, FlytuneError):
            raise result
        return result.value

    def end(self, number: int, frame: Any) -> None:
        """Let the worker save, say what is saved, and leave: the handler of Ctrl-C and SIGTERM.

        Raises:
            SystemExit: always, but at a further signal, which the worker gets too.
        """
        if self.is_ending:
            return
        self.is_ending = True
        leave(self.worker, number, self.orchestrator, self.recipe, self.stage_has_recipe)


def in_worker(
    orchestrator: ThisMachine, name: str, key: str, inputs: Mapping[str, Any]
) -> StageResult | FlytuneError:
    """Run a stage in this process, or in ranks that it starts; return its result, or the error that a person
    must correct."""
    stage = next(row for row in table.ROWS if row.name == name)
    function = prepare.prepare_for_training if stage == table.PREPARE else None
    try:
        return call_of(stage, orchestrator, inputs, key, function).run()
    except FlytuneError as error:
        # What a light stage refuses says itself what to do; other failures have the words of the table of
        # failures.
        if stage.place == "shape" or reports.of_error(error, rank=0).recoverable:
            raise
        return error


@contextmanager
def _machine() -> Iterator[_Machine]:
    """Yield the machine of one run, whose folders are removed afterwards."""
    # torch's threads that wait would keep their cores busy: a step on a CPU takes three to five times as
    # long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    machine = _Machine(Path(tempfile.mkdtemp(prefix="flytune-run-")))
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        end = process_setup.outside_logging(machine.end)
        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield machine
    finally:
        machine.worker.end()
        for number, handler in before.items():
            signal.signal(number, handler)
        if not machine.has_result:
            shutil.rmtree(machine.orchestrator.root, ignore_errors=True)


def _digest(stage: Stage, inputs: Mapping[str, Any]) -> str:
    """Return 32 hex digits of everything that a cached result follows from."""
    assert stage.cache is not None
    text = f"{stage.cache.version} {points.key(stage, inputs)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _is_whole(folder: Path) -> bool:
    """Return whether a cached folder has the files that were written, to the byte."""
    try:
        return list_files(folder / _CONTENT) == Contents.read(folder / _LIST).files
    except (OSError, RecordError):
        return False
