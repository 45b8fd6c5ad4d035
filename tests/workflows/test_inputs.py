"""Inputs of `pyflyte run` from outside: one strict reader for recipes, grids and files of inputs."""

import math
import os
import sys
from pathlib import Path

import pytest

from flytune.cluster import signed_uploads, uploads
from flytune.errors import FlytuneError, RecipeError
from flytune.recipe import Recipe
from flytune.recipe import inputs as recipe_inputs
from tests.support import fork_server
from tests.support.paths import ROOT
from workflows import inputs

TEXTS = {
    "twice": '{"training.seed": [1], "training.seed": [2]}',
    "no number": '{"a": NaN}',
    "infinite": '{"a": 1e400}',
    "digits": '{"a": ' + "9" * 5000 + "}",
    "deep": "[" * 100_000,
    "surrogate": '{"a": "\\ud800"}',
    "a password": '{"a": "s3://user:hunter22@host/x"}',
}
FILES = {
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "latin-1": '{"a": "é"}'.encode("latin-1"),
    "nul": b'{"a": 1}\0',
    "empty": b"",
    "deep": b"[" * 3000,
    "twice": b'{"a": 1,\n "a": 2}',
}


@pytest.mark.parametrize("kind", [dict, Recipe, list[dict]])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_json_of_the_command_line_is_read_strictly(text, kind):
    with pytest.raises(RecipeError, match="--grid: ") as error:
        recipe_inputs.content(text, "--grid", kind)
    assert "hunter22" not in str(error.value)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_files_of_other_encodings_and_damaged_ones_are_refused(content, suffix, tmp_path):
    file = tmp_path / f"grid.{suffix}"
    file.write_bytes(content)
    with pytest.raises(RecipeError, match="grid"):
        recipe_inputs.content(str(file), "--grid", dict)


@pytest.mark.parametrize("value", ["/dev/zero", "", "null", "x\0y", "\udcff", "nowhere.json", "/", "[1]"])
def test_values_that_are_no_mapping_and_no_file_are_refused(value):
    with pytest.raises(FlytuneError):
        recipe_inputs.content(value, "--grid", dict)


def test_json_and_files_of_json_and_yaml_are_one_value(tmp_path):
    wanted = {"training.seed": [1, 2]}
    (tmp_path / "grid.json").write_bytes(b'\xef\xbb\xbf{\t"training.seed": [1, 2]}')
    (tmp_path / "grid.yaml").write_text("training.seed: [1, 2]")
    for value in ('{"training.seed": [1, 2]}', str(tmp_path / "grid.json"), str(tmp_path / "grid.yaml")):
        assert recipe_inputs.content(value, "--grid", dict) == wanted


def test_a_file_of_inputs_is_read_strictly(tmp_path):
    file = tmp_path / "inputs.yaml"
    file.write_bytes("recipe: é".encode("latin-1"))
    with file.open() as opened, pytest.raises(RecipeError, match="not UTF-8"):
        inputs._inputs_file(opened)


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "x", "hf_" + "a" * 30, "s3://user:hunter22@host"])
def test_a_bad_limit_of_uploads_is_refused_and_not_shown_where_it_is_a_secret(value, monkeypatch):
    monkeypatch.setenv(uploads.LIMIT_VARIABLE, value)
    with pytest.raises(RecipeError, match=uploads.LIMIT_VARIABLE) as error:
        signed_uploads.limit()
    assert "hf_a" not in str(error.value)
    assert "hunter22" not in str(error.value)


def test_a_limit_of_uploads_is_a_number_of_gib(monkeypatch):
    monkeypatch.setenv(uploads.LIMIT_VARIABLE, "2.5")
    assert signed_uploads.limit() == 2.5
    monkeypatch.delenv(uploads.LIMIT_VARIABLE)
    assert math.isfinite(signed_uploads.limit())


@pytest.mark.parametrize(
    ("arguments", "shown", "hidden"),
    [
        (["finetune.py", "--help"], ["finetune", "Plan, prepare the data"], ["report_failure", "make_plan"]),
        (["refresh.py", "--help"], ["rollback"], ["decide_refresh"]),
        (
            ["finetune.py", "finetune", "--help"],
            ["--recipe", "a YAML or JSON file, or JSON"],
            ["additionalProperties"],
        ),
        (["refresh.py", "refresh"], ["Missing option '--recipe'"], ["TypeError"]),
    ],
)
def test_pyflyte_lists_workflows_shows_an_input_in_a_line_and_asks_for_what_is_missing(
    arguments, shown, hidden
):
    command = [Path(sys.executable).with_name("pyflyte"), "run", f"workflows/{arguments[0]}", *arguments[1:]]
    done = fork_server.run(command, ROOT, dict(os.environ))
    text = done.stdout + done.stderr
    assert [word for word in shown if word not in text] == []
    assert [word for word in hidden if word in text] == []
