"""Tests of the images' pyflyte-fast-execute, compared with flytekit's own."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from flytekit.models.literals import LiteralMap

from tests.support.paths import ROOT

CODE = """
import os
from flytekit import task

@task
def ids() -> None:
    print("PIDS", os.getpid(), os.environ["PYTHONPATH"])

@task
def fails() -> None:
    raise ValueError("the task's error")
"""
OWN = ROOT / "images" / "fast_execute.py"
FLYTEKIT = Path(sys.executable).with_name("pyflyte-fast-execute")


@pytest.fixture
def run(tmp_path):
    """Return a function that executes a task of CODE, from an archive, and returns the process and its
    output."""
    (tmp_path / "code").mkdir()
    (tmp_path / "fetched.py").write_text(CODE)
    with tarfile.open(tmp_path / "code.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "fetched.py", "fetched.py")
    (tmp_path / "fetched.py").unlink()
    (tmp_path / "inputs.pb").write_bytes(LiteralMap({}).to_flyte_idl().SerializeToString())

    def executed(script, task, *before, **variables):
        place = f"{tmp_path}/{script.stem}"
        fetch = [
            "--additional-distribution",
            str(tmp_path / "code.tar.gz"),
            "--dest-dir",
            str(tmp_path / "code"),
            "--",
        ]
        execute = [
            "pyflyte-execute",
            "--inputs",
            str(tmp_path / "inputs.pb"),
            "--output-prefix",
            f"{place}/out",
        ]
        execute += ["--raw-output-data-prefix", f"{place}/raw", "--resolver"]
        execute += ["flytekit.core.python_auto_container.default_task_resolver", "--"]
        execute += ["task-module", "fetched", "task-name", task]
        environment = os.environ | {
            "PYTHONPATH": str(tmp_path / "code"),
            "FLYTE_INTERNAL_EXECUTION_ID": "e",
            "FLYTE_LOGGING_LEVEL": "40",
            "PATH": f"{FLYTEKIT.parent}:{os.environ['PATH']}",
        }
        command = [sys.executable, *before, str(script), *fetch, *execute]
        process = subprocess.Popen(
            command,
            env=environment | variables,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said, _ = process.communicate(timeout=600)
        outputs = sorted(path.name for path in Path(place, "out").glob("*"))
        return process, said, outputs

    return executed


def ids(said):
    (line,) = [line for line in said.splitlines() if line.startswith("PIDS")]
    return line.split()[1:]


def test_one_process_fetches_the_code_and_executes_the_task(run, tmp_path):
    process, said, outputs = run(OWN, "ids")
    assert process.returncode == 0, said
    number, path = ids(said)
    assert int(number) == process.pid
    usual, said, usual_outputs = run(FLYTEKIT, "ids")
    usual_number, usual_path = ids(said)
    assert int(usual_number) != usual.pid
    assert (outputs, path) == (usual_outputs, usual_path)


def test_a_failed_task_ends_as_with_flytekit(run):
    process, said, outputs = run(OWN, "fails")
    usual, usual_said, usual_outputs = run(FLYTEKIT, "fails")
    assert "the task's error" in said
    assert "the task's error" in usual_said
    assert (process.returncode, outputs) == (usual.returncode, usual_outputs)


def test_a_process_that_cannot_see_the_code_starts_another(run, tmp_path):
    process, said, _ = run(OWN, "ids", PYTHONPATH="")
    assert process.returncode == 0, said
    assert int(ids(said)[0]) != process.pid


def test_a_process_that_has_imported_the_project_starts_another(run, tmp_path):
    import_first = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); import flytune; sys.argv.pop(0)"
    process, said, _ = run(
        OWN, "ids", "-c", f"{import_first}; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    assert process.returncode == 0, said
    assert int(ids(said)[0]) != process.pid
