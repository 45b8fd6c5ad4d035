"""Tests of pyflyte's display of errors: only the message of Flytune's errors, the traceback of bugs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from flytekit.exceptions.user import FlyteUserRuntimeException

from flytune.errors import DataError, RecipeError
from tasks.runtime.errors import own_error
from tasks.runtime.retries import AttemptFailed, RunFailed
from tests.support.paths import ROOT

WORKFLOW = """
import tasks
from flytekit import dynamic, task, workflow
from flytune.errors import DataError

@task
def fail(kind: str) -> str:
    if kind == "ours":
        raise DataError("rows.jsonl:7: no such column")
    return {}["a bug"]

@dynamic
def within(kind: str) -> str:
    return fail(kind=kind)

@workflow
def failing(kind: str) -> str:
    return within(kind=kind)
"""


@pytest.fixture
def pyflyte(tmp_path):
    """A function that runs pyflyte in a project with a workflow that fails."""
    (tmp_path / "failing.py").write_text(WORKFLOW)

    def run(*arguments):
        command = [Path(sys.executable).with_name("pyflyte"), *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540
        )

    return run


def test_only_the_message_of_our_errors_is_shown(pyflyte):
    done = pyflyte("run", "failing.py", "failing", "--kind", "ours")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "DataError: rows.jsonl:7: no such column"
    assert "Traceback" not in done.stdout + done.stderr


def test_v_shows_the_traceback_of_our_errors(pyflyte):
    done = pyflyte("-v", "run", "failing.py", "failing", "--kind", "ours")
    assert done.returncode == 1
    assert "Traceback" in done.stdout
    assert "rows.jsonl:7: no such column" in done.stdout


def test_a_bug_keeps_its_traceback(pyflyte):
    done = pyflyte("run", "failing.py", "failing", "--kind", "bug")
    assert done.returncode == 1
    assert "Traceback" in done.stdout
    assert "KeyError" in done.stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "recipe.yaml: no such file; there are: "),
        pytest.param("just text", "must be a mapping; found 'just text'", marks=pytest.mark.slow),
        pytest.param("{name: x", "recipe.yaml: not YAML: ", marks=pytest.mark.slow),
        (
            "name: x\ntraining: {learning_rat: 1}",
            "training.learning_rat: unknown key; did you mean learning_rate?",
        ),
    ],
    ids=["missing", "text", "cut off", "unknown key"],
)
def test_a_recipe_that_cannot_be_read_is_our_error(content, said, tmp_path, pyflyte):
    (tmp_path / "other.yaml").touch()
    recipe = tmp_path / "recipe.yaml"
    if content is not None:
        recipe.write_text(content)
    done = pyflyte("run", str(ROOT / "workflows" / "finetune.py"), "finetune", "--recipe", str(recipe))
    assert done.returncode == 1
    assert done.stderr.startswith("RecipeError: ")
    assert said in done.stderr
    assert done.stdout == ""


def raised(error, cause):
    with pytest.raises(type(error)) as caught:
        raise error from cause
    return caught.value


def test_our_error_is_found_within_flytekits():
    prefix = "Error encountered while executing 'a.b':\n  "
    ours = DataError(f"{prefix}{prefix}x.jsonl:1: bad")
    assert str(own_error(FlyteUserRuntimeException(ours))) == "x.jsonl:1: bad"
    assert own_error(raised(ValueError("what flytekit says"), ours)) is ours
    assert str(own_error(raised(RunFailed(f"{prefix}rank 1: bug"), KeyError("bug")))) == "rank 1: bug"
    assert isinstance(own_error(AttemptFailed("again")), AttemptFailed)


def test_a_bug_is_not_our_error_even_if_one_was_handled():
    assert own_error(KeyError("x")) is None
    with pytest.raises(KeyError) as caught:
        try:
            raise RecipeError("handled")
        except RecipeError:
            raise KeyError("a bug")  # noqa: B904
    assert own_error(caught.value) is None


def test_a_cached_result_whose_folder_is_gone_is_our_error(tmp_path):
    from flytekit.core.type_engine import TypeTransformerFailedError

    def error(folder):
        return TypeTransformerFailedError(
            f'Cannot convert from scalar {{\n  blob {{\n    uri: "{folder}"\n  }}\n}}'
        )

    assert own_error(error(tmp_path)) is None
    own = own_error(error(tmp_path / "gone"))
    assert str(own).startswith(f"{tmp_path}/gone: the folder of a cached local result is gone")
    assert "pyflyte local-cache clear" in str(own)


def test_an_error_that_is_its_own_cause_is_looked_at_once():
    error = ValueError("a bug")
    error.__cause__ = error
    assert own_error(error) is None
    assert own_error(FlyteUserRuntimeException(error, 0)) is None
