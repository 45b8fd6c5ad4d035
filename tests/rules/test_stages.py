"""Stages are functions without Flyte and rows of one table; tasks/ declares them and has no logic."""

import ast
import inspect
from importlib import import_module

import pytest
from flytekit import PythonFunctionTask
from flytekit.core.context_manager import FlyteEntities

from flytune.stages import table
from flytune.stages.planned import Planned
from flytune.stages.table import RUN, Stage
from flytune.stages.value_types import OWN
from tasks.runtime import face
from tests.support.paths import ROOT

TASKS = sorted(path for path in (ROOT / "tasks").glob("*.py") if path.name != "__init__.py")
ROWS = {name: row for name, row in vars(table).items() if isinstance(row, Stage)}
STAGES = [stage for phase in RUN for stage in phase.stages]
MOST_LINES = 10
for _path in TASKS:
    import_module(f"tasks.{_path.stem}")


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_a_file_of_tasks_has_no_logic(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.With), (
            f"{where}: write it in flytune/stages/"
        )
        if isinstance(node, ast.FunctionDef):
            assert len(node.body) <= MOST_LINES, where


def test_every_row_is_declared_under_a_name_of_its_own():
    assert len(ROWS) > 20
    assert len({row.name for row in ROWS.values()}) == len(ROWS)
    assert {row.name for row in ROWS.values()} == set(face.TASKS)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_of_a_run_is_given_what_its_function_takes(stage):
    function = stage.load()
    own = [name for name in inspect.signature(function).parameters if name not in OWN]
    assert set(stage.inputs) == set(own)
    assert stage.over == "" or stage.over in own
    assert stage.name in face.TASKS


def test_a_stage_of_a_run_takes_what_is_there_before_it():
    known = {*Planned.model_fields, "harness_data", "export_only"}
    for stage in STAGES:
        assert set(stage.inputs.values()) <= known, stage.name
        assert stage.makes not in known, f"{stage.name}: {stage.makes} is made twice"
        known.add(stage.makes)
        assert stage.on in {"", *known}


def test_a_stage_in_a_light_pod_says_what_it_requests_and_one_on_a_shape_does_not():
    for name, row in ROWS.items():
        assert (row.requests is not None) == (row.place in ("light", "plan")), name


def test_every_task_of_a_pod_is_a_stage():
    """A task with a function of its own would be missing in the table, and in another face."""
    tasks = [
        entity
        for entity in FlyteEntities.entities
        if isinstance(entity, PythonFunctionTask) and entity.name.startswith("tasks.")
    ]
    assert len(tasks) > 20
    for one in tasks:
        assert one.task_function.__wrapped__.__module__.startswith("flytune.stages."), one.name
