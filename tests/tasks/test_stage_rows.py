"""A new stage is a function and a row of the table: its task is declared from them."""

import importlib
import sys
from types import ModuleType

import pytest
from flytekit.core.context_manager import FlyteEntities

from flytune.stages import table
from flytune.stages.table import Phase, Resources, Stage
from tasks import run
from tasks.runtime import face


def measure(recipe_name: str) -> int:
    """Return the length of a name."""
    return len(recipe_name)


@pytest.fixture
def declared(monkeypatch):
    """Declare a row between training and evaluation, whose function is in a module of its own."""
    module = ModuleType("flytune.stages.length")
    module.measure = measure
    monkeypatch.setitem(sys.modules, module.__name__, module)
    row = Stage(
        "length", "length.measure", requests=Resources(1, 1), makes="length", inputs={"recipe_name": "name"}
    )
    monkeypatch.setattr(table, "RUN", (*table.RUN[:2], Phase("length", (row,)), *table.RUN[2:]))
    monkeypatch.setattr(face, "TASKS", dict(face.TASKS))
    monkeypatch.setattr(FlyteEntities, "entities", list(FlyteEntities.entities))
    importlib.reload(run)
    yield row
    monkeypatch.undo()
    importlib.reload(run)
    del run.measure


def test_a_stage_without_a_module_of_tasks_is_declared_by_its_row(declared):
    made = face.TASKS[declared.name]
    assert made.name == "tasks.run.measure"
    assert run.measure is made, "a pod loads the task by the module and the name of its function"
    assert made(recipe_name="four") == 4


def test_every_row_names_its_function():
    for row in table.ROWS:
        if row.function:
            assert row.load().__module__ == f"flytune.stages.{row.function.partition('.')[0]}"
