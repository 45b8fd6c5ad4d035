"""`flytune run`: the command of pyflyte that it prints and becomes for a cluster, and the run on this
machine."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from flytekit.configuration.file import get_config_file

from flytune import cli
from flytune.cli import run
from flytune.hardware import this_machine
from flytune.planning import planner
from flytune.recipe import Recipe, inputs, read_recipe
from flytune.stages import local, plan
from flytune.stages.harness import HarnessData
from tests.support.paths import ROOT
from tests.support.recipes import content
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content(data={"path": str(tmp_path / "none.jsonl")})))
    return path


@pytest.fixture
def started(monkeypatch):
    """List of the commands that would replace this process."""
    commands = []

    def start(program, arguments):
        commands.append(arguments[1:])
        raise SystemExit(7)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run.os, "execv", start)
    # A run of Flyte 2 on a cluster is followed to its end (tests/flyte2/test_remote_run.py).
    monkeypatch.setattr(run, "_follow", lambda command, options: start(command[0], command))
    return commands


@pytest.fixture
def answering(monkeypatch):
    """A cluster that answers."""
    monkeypatch.setattr(run, "_ask_cluster", lambda options: None)


@pytest.mark.parametrize(
    ("given", "command"),
    [
        (["--remote"], "run --remote --copy all workflows/finetune.py finetune --recipe {}"),
        (
            [
                "--remote",
                "-p",
                "team",
                "-d",
                "production",
                "--name",
                "first",
                "-i",
                "a=b/c:1",
                "--image",
                "d=e",
            ],
            "run --remote --copy all --project team --domain production --name first --image a=b/c:1 --image "
            "d=e workflows/finetune.py finetune --recipe {}",
        ),
        (
            ["--remote", "--grid", "g.yaml"],
            "run --remote --copy all workflows/sweep.py sweep --recipe {} --grid g.yaml",
        ),
        (
            ["--remote", "--changes", "c.yaml"],
            "run --remote --copy all workflows/sweep.py sweep --recipe {} --changes c.yaml",
        ),
    ],
)
def test_it_prints_and_becomes_the_command_of_pyflyte(given, command, recipe, started, answering, capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", str(recipe), *given])
    wanted = command.format(recipe)
    assert started == [wanted.split()]
    assert capsys.readouterr().out == f"$ pyflyte {wanted}\n"


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ([], "run --local flyte2/finetune.py finetune --recipe {}"),
        (
            ["--remote", "-p", "team", "-d", "production", "--name", "first", "-i", "a=b/c:1"],
            "run --copy-style all --follow --project team --domain production --name first --image a=b/c:1 "
            "flyte2/finetune.py finetune --recipe {}",
        ),
        (["--grid", "grid.yaml"], "run --local flyte2/sweep.py sweep --recipe {} --grid grid.yaml"),
    ],
)
def test_it_becomes_the_command_of_flyte_2(given, command, recipe, started, answering, capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", str(recipe), "--flyte2", *given])
    wanted = command.format(recipe)
    assert started == [wanted.split()]
    assert capsys.readouterr().out == f"$ flyte {wanted}\n"
    assert os.environ.pop("FLYTE_DISABLE_TELEMETRY") == "1"


def test_without_the_command_of_flyte_2_the_extra_is_named(recipe, started, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["run", str(recipe), "--flyte2"]) == 1
    assert "pip install -e '.[flyte2]' in the clone installs it" in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        (
            None,
            [],
            "flyte config: none; no cluster is configured; start Flyte's sandbox with `flytectl demo start`",
        ),
        (
            None,
            ["--flyte2"],
            "--flyte2 --remote: no configuration of Flyte 2 names a cluster; `flyte create config",
        ),
        (
            "admin: {endpoint: 'dns:///127.0.0.1:1', insecure: true}\n",
            [],
            "admin: 127.0.0.1:1 does not answer",
        ),
        (
            "admin: {endpoint: 'dns:///127.0.0.1:1', insecure: true}\ntask: {project: a, domain: b}\n",
            ["--flyte2"],
            "control plane: ",
        ),
    ],
)
def test_without_a_cluster_nothing_is_sent(
    config, given, said, recipe, started, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FLYTECTL_CONFIG", raising=False)
    get_config_file.cache_clear()
    if config:
        (tmp_path / "config.yaml").write_text(config)
        monkeypatch.setenv("FLYTECTL_CONFIG", str(tmp_path / "config.yaml"))
    assert cli.main(["run", str(recipe), "--remote", *given]) == 1
    shown = capsys.readouterr()
    assert said in shown.err
    assert started == []
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("given", "said"), [(["--remote"], "stores its artifact there"), ([], "leave one of the two out")]
)
def test_a_folder_for_results_is_refused_where_they_are_stored_elsewhere(
    given, said, recipe, started, tmp_path, capsys
):
    recipe.write_text(yaml.safe_dump(content(publish={"address": "s3://b/models"})))
    assert cli.main(["run", str(recipe), "--out", str(tmp_path / "out"), *given]) == 1
    assert said in capsys.readouterr().err
    assert started == []


def test_what_a_shell_would_split_is_printed_quoted(recipe, started, answering, capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", str(recipe), "--remote", "--grid", '{"training.learning_rate": [1e-4]}'])
    assert """ --grid '{"training.learning_rate": [1e-4]}'\n""" in capsys.readouterr().out


def test_elsewhere_it_takes_the_workflows_of_the_clone(recipe, started, answering, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["run", str(recipe), "--remote"])
    assert started[0][4] == str(ROOT / "workflows" / "finetune.py")


def test_mistakes_are_refused_before_anything_is_started(recipe, started, capsys):
    assert cli.main(["run", str(recipe), "--name", "x"]) == 1
    assert "RecipeError: --name: says where on a cluster to run; give --remote too" in capsys.readouterr().err
    recipe.write_text("name: x\n")
    assert cli.main(["run", str(recipe)]) == 1
    assert "missing" in capsys.readouterr().err
    assert started == []


def test_without_pyflyte_it_says_what_installs_it(recipe, started, capsys, monkeypatch):
    monkeypatch.setattr(run.sys, "executable", "/nowhere/python")
    monkeypatch.setattr(run.shutil, "which", lambda name: None)
    assert cli.main(["run", str(recipe), "--remote"]) == 1
    assert (
        "pyflyte: not installed beside /nowhere/python, nor on PATH; `make install` in the clone"
        in capsys.readouterr().err
    )


def of_process(arguments, folder, path):
    environment = os.environ | {"PYTHONPATH": str(path), "HOME": str(folder), "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "flytune.cli", "run", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_a_run_on_this_machine_ends_with_its_error(recipe, tmp_path):
    done = of_process([recipe], tmp_path, ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert "none.jsonl: no such file or folder" in done.stderr
    assert "heckpoints are" not in done.stdout + done.stderr, "nothing but the error is said"


def test_it_starts_without_flytekit(recipe, tmp_path):
    code = (
        f"import sys; from flytune import cli; cli.main(['run', {str(recipe)!r}, '--name', 'x']); "
        "print(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"flytekit", "torch", "transformers"} & set(done.stdout.replace("'", "").split(", "))


@pytest.mark.parametrize("face", [[], ["--flyte2"]])
def test_changes_of_the_command_line_reach_the_cluster_and_leave_no_file(
    face, recipe, started, answering, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    changes = ["--shape", "l4-1", "--set", "training.learning_rate=3e-4"]
    with pytest.raises(SystemExit):
        cli.main(["run", str(recipe), "--remote", *face, *changes])
    given = started[0][started[0].index("--recipe") + 1]
    sent = Recipe.model_validate(inputs.content(given, "--recipe", Recipe))
    assert (sent.hardware.shape, sent.training.learning_rate) == ("l4-1", 0.0003)
    assert sent.data == read_recipe(recipe).data
    assert list(tmp_path.iterdir()) == [recipe]
    recipe.write_text(yaml.safe_dump(content(description="x" * 2**17)))
    assert cli.main(["run", str(recipe), "--remote", *face, *changes]) == 1
    assert "write the changes into its file" in capsys.readouterr().err


def test_a_run_on_this_machine_without_hardware_is_on_this_machine():
    folder = Path(tempfile.mkdtemp())
    content = tiny_recipe(tiny_base(folder), write_pairs(folder / "pairs.jsonl", 16))
    del content["hardware"], content["sharding"]
    asked = Recipe.model_validate(content)
    here = local.ThisMachine(folder)
    planned = plan.plan_run(here, asked, HarnessData(here))
    kind = this_machine.rows()[0]
    assert (planned.plan.shape, planned.plan.accelerator, planned.shape) == (
        "this-machine",
        kind.accelerator,
        "this-machine",
    )
    assert planned.recipe.sharding.name != "auto"
    assert planned.plan.key == planned.recipe.key()
    named = planner.on_shape(asked, "cpu-2")
    assert plan.plan_run(here, named, HarnessData(here)).recipe.sharding.name == "ddp"
