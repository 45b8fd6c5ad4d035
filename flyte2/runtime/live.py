"""The report of a run while it trains: its page is replaced every few seconds, as the steps are logged."""

import contextvars
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import flyte
import flyte.report

from flytune import json_core
from flytune.console import step_lines
from flytune.records import Step
from flytune.report import live
from flytune.stages.calls import Call
from flytune.storage import Storage

SECONDS = 15.0
"""Interval at which a changed page is stored."""


@contextmanager
def reported(call: Call) -> Iterator[Call]:
    """Show the steps of a call that trains in its report; yield the call that tells where they are."""
    with tempfile.TemporaryDirectory(prefix="flytune-live-") as folder:
        pointer, over = Path(folder, "steps"), threading.Event()
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=[_watch, call, pointer, over], daemon=True)
        thread.start()
        try:
            yield replace(call, live=str(pointer))
        finally:
            over.set()
            thread.join()


def _watch(call: Call, pointer: Path, over: threading.Event) -> None:
    recipe, plan, seen = call.inputs["recipe"], call.inputs["plan"], 0
    while not over.wait(SECONDS):
        steps = _steps(pointer)
        if len(steps) > seen:
            seen = len(steps)
            _show(live.page(recipe.name, steps, recipe.training.max_steps or plan.steps or steps[-1].step))


def _steps(pointer: Path) -> list[Step]:
    """Return the logged steps; a line that is being written is left out."""
    try:
        lines = Path(pointer.read_text(encoding="utf-8")).read_text(encoding="utf-8").split("\n")[:-1]
        return [Step.model_validate(json_core.load_object(line.encode())) for line in lines]
    except (OSError, ValueError):
        return []


def _show(page: str) -> None:
    """Replace the page of the running attempt. Nothing of it may end the training."""
    flyte.report.get_tab("main").replace(page)
    with tempfile.TemporaryDirectory(prefix="flytune-live-") as folder:
        file = Path(folder, "report.html")
        file.write_text(str(flyte.report.current_report().get_final_report()), encoding="utf-8")
        try:
            # Not by the SDK, whose file systems are put aside while a stage runs (file_systems.py).
            Storage(flyte.ctx().output_path, "", retry=False).copy(file, file.name)
        except Exception as error:  # noqa: BLE001 (each file system has errors of its own)
            step_lines.show(f"the report was not stored: {error}")
