"""Both faces declare the stages of one table; neither has logic of its own."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module

import pytest
from flyte._internal.runtime.types_serde import transform_native_to_typed_interface
from flyte._task import TaskTemplate
from flytekit.core.workflow import PythonFunctionWorkflow

from flyte2.runtime.face import environments
from flyte2.stages import TASKS
from flytune.failures.table import KINDS
from flytune.stages import declared, table
from flytune.stages.table import Stage
from tasks.runtime import face
from tests.support.paths import ROOT

for _path in (ROOT / "tasks").glob("*.py"):
    import_module(f"tasks.{_path.stem}")
NAMES = ("finetune", "infer", "parts", "refresh", "selftest", "sft_then_dpo", "sweep", "upstream")


def offered(face, kind):
    """Return the workflows of a face by their names."""
    values = [item for name in NAMES for item in vars(import_module(f"{face}.{name}")).items()]
    return {name: value for name, value in values if isinstance(value, kind)}


FIRST, SECOND = offered("workflows", PythonFunctionWorkflow), offered("flyte2", TaskTemplate)
WORKFLOWS = {
    name: function
    for name, function in vars(declared).items()
    if inspect.isfunction(function) and function.__module__ == declared.__name__
}
del WORKFLOWS["as_workflow"], WORKFLOWS["scheduled_inputs"]
ROWS = {row.name: row for row in vars(table).values() if isinstance(row, Stage)}
ROOM = ("doctor/flyte2", "cluster/debug_program", "cluster/flyte2_sdk", "cluster/runs_of_flyte2")
CLIENTS = {ROOT / f"flytune/{name}.py" for name in ROOM}
"""Modules that speak to a control plane of Flyte 2, and import its SDK inside functions."""
FILES = sorted((ROOT / "flyte2").rglob("*.py"))


def test_both_faces_declare_exactly_the_table():
    assert set(ROWS) == set(TASKS) == set(face.TASKS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_declared_as_flyte_1_declares_it(name):
    row, second = ROWS[name], TASKS[name]
    first = face.TASKS[name]
    first = next(iter(first.values())) if isinstance(first, dict) else first
    first = getattr(first, "_run_task", first)  # of a map task
    assert list(second.native_interface.inputs) == list(first.python_interface.inputs)
    assert bool(row.report) == (not first._disable_deck)
    # Only Flyte 2 shows a report before its task ends.
    assert second.report == (bool(row.report) or row is table.TRAIN)
    assert second.retries.count == row.retries
    if row.requests:
        assert first.metadata.retries == row.retries
    asked = (
        [(secret.key, secret.group, secret.env_var) for secret in first.security_context.secrets]
        if first.security_context
        else []
    )
    assert [(one.key, one.group, one.as_env_var) for one in environments[name].secrets or []] == asked
    cached = first.metadata.cache
    assert second.cache.is_enabled() == cached if hasattr(second.cache, "is_enabled") else not cached
    if cached:
        assert second.cache.get_version() == first.metadata.cache_version
        assert second.cache.get_ignored_inputs() == first.metadata.cache_ignore_input_vars


def test_an_interface_carries_no_schema():
    for task in TASKS.values():
        assert transform_native_to_typed_interface(task.native_interface).ByteSize() < 2000


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_both_faces_offer_a_workflow_as_it_is_declared(name):
    function = WORKFLOWS[name]
    first, second = FIRST[name], SECOND[name]
    parameters = inspect.signature(function).parameters.values()
    given = {one.name: one.default for one in parameters}
    assert {key: value for key, (_, value) in second.native_interface.inputs.items()} == given
    given = {key: None if value is inspect.Parameter.empty else value for key, value in given.items()}
    assert {key: value for key, (_, value) in first.python_interface.inputs_with_defaults.items()} == given
    assert first.docs.short_description == function.__doc__.splitlines()[0]
    assert second.func.__doc__ == function.__doc__


def test_the_library_and_the_first_face_import_no_sdk_of_flyte_2():
    for path in [
        path
        for top in ("flytune", "training_estimates", "tasks", "workflows", "images")
        for path in (ROOT / top).rglob("*.py")
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if path in CLIENTS and getattr(node, "col_offset", 0):
                continue
            assert not [name for name in names if name.split(".")[0] in ("flyte", "flyte2", "flyteidl2")], (
                path
            )


def test_the_second_face_imports_neither_flytekit_nor_torch():
    code = "import sys, flyte2.sweep, flyte2.infer; print({'flytekit', 'torch', 'tasks'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "set()", done.stderr[-2000:]


def test_without_the_sdk_a_sentence_names_the_extra():
    code = (
        "import importlib.metadata as m; real = m.version\n"
        "def version(name):\n"
        "    if name == 'flyte': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "import flyte2"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    said = (
        "it needs flyte 2.12, the SDK of Flyte 2, and found none; install the extra flyte2: pip install "
        "-e '.[flyte2]'"
    )
    assert said in done.stderr


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_failure_is_retried_by_the_one_table(kind):
    from flyte._internal.runtime.convert import convert_from_native_to_error

    from flyte2.runtime.failures import raised
    from flytune.failures.reports import _failure
    from tasks.runtime.retries import FlyteRecoverableException, flyte_error

    failure = _failure(kind, 1, "what happened")
    second = convert_from_native_to_error(raised(failure, "train", has_ranks=True))
    assert (
        second.recoverable == kind.recoverable == isinstance(flyte_error(failure), FlyteRecoverableException)
    )
    assert f"rank 1: {kind.name}: what happened\nwhat to do: {kind.advice}" in second.err.message
    assert ("OOM" in second.err.code) == (kind.name in ("out of GPU memory", "killed again"))
