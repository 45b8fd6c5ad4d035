"""Rules of the Makefile: the commands that its targets run, and a package that is really made."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from flyteidl.admin import launch_plan_pb2, task_pb2, workflow_pb2

from flytune.hardware import load_shapes
from tests import proofs
from tests.release import KEPT
from tests.support.make import lines
from tests.support.paths import ROOT
from tests.support.sources import copy, tracked


def test_remote_and_register_show_the_command_after_checking_plan_and_cluster():
    remote = (
        "pyflyte run --remote --copy all --project p --domain d workflows/finetune.py finetune "
        "--recipe recipes/x.yaml"
    )
    made = lines("remote", PROJECT="p", DOMAIN="d", RECIPE="recipes/x.yaml")
    asked = ["flytune plan recipes/x.yaml", "flytune doctor --remote --reach"]
    assert made[-4:] == [*asked, f'echo "{remote}"', remote]
    where = "--project flytesnacks --domain development --copy all --destination-dir ."
    register = f"pyflyte register {where} --version v1 workflows"
    assert lines("register", VERSION="v1")[-3:] == [
        "flytune doctor --remote --reach",
        f'echo "{register}"',
        register,
    ]
    assert "--version" not in lines("register")[-1]


def test_every_file_with_tests_that_run_before_a_release_alone_is_there():
    """The cases of a file that was moved would run for every change again."""
    assert [name for name in KEPT if not (ROOT / "tests" / name).is_file()] == []


NEW = ("--assume-new", "requirements-dev.lock")
"""Options of make by which nothing is installed yet."""


def installed(**variables):
    """Return what is installed, in order, and all commands."""
    made = lines("install", *NEW, BIN="nowhere/bin", **variables)
    return [line.partition("; install ")[2] for line in made if "; install " in line], made


def test_torch_without_cuda_is_installed_before_the_lock():
    (version,) = {
        line for line in (ROOT / "requirements-dev.lock").read_text().split() if line.startswith("torch==")
    }
    cpu, _ = installed(TORCH="cpu")
    assert cpu[0].startswith(f'"{version}+cpu" ||')
    assert "set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, or PIP_FIND_LINKS" in cpu[0]
    locks = [f"--no-deps --requirement requirements-{name}.lock" for name in ("dev", "model")]
    assert cpu[1:] == ["--constraint requirements-dev.lock torch", *locks]
    plain, _ = installed()
    assert plain == cpu[1:]
    _, refused = installed(TORCH="cu12")
    assert any("TORCH=cu12: unknown; cpu, or leave it out" in line for line in refused)


def test_images_are_built_and_pushed_with_one_command(tmp_path):
    """docker is a stand-in that writes what it was asked."""
    seen = tmp_path / "seen"
    (tmp_path / "docker").write_text(f'#!/bin/sh\necho "$*" >> {seen}\n')
    (tmp_path / "docker").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FLYTUNE_REGISTRY": ""}

    def images(*variables):
        command = ["make", "images", "TAG=abc", f"BIN={tmp_path}", *variables]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    built = images("REGISTRY=ghcr.io/someone")
    asked = seen.read_text().splitlines()
    assert [line.split()[0] for line in asked] == ["build", "push"] * 2, built.stderr
    for name, build, push in (("light", asked[0], asked[1]), ("train", asked[2], asked[3])):
        assert f"--target {name} " in build
        assert build.endswith(f"--tag ghcr.io/someone/flytune-{name}:abc .")
        assert push == f"push ghcr.io/someone/flytune-{name}:abc"
    assert "export FLYTUNE_REGISTRY=ghcr.io/someone FLYTUNE_TAG=abc" in built.stdout
    refused = images()
    assert refused.returncode
    assert "make images REGISTRY=...: name the registry" in refused.stderr


@pytest.mark.parametrize("fails", ["", "uv"])
def test_pip_installs_what_uv_cannot_and_no_address_is_printed(fails, tmp_path):
    """The programs are stand-ins that write what they were asked; pip's own configuration is real."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    seen = tmp_path / "seen"
    for name in ("uv", "python"):
        ask = f'echo "{name} $* ${{UV_DEFAULT_INDEX:-}}" >> {seen}\n'
        if name == "python":  # pip's settings are read, installations recorded
            ask = f'case "$*" in *"pip config"*) exec {sys.executable} "$@";; esac\n{ask}'
        (binaries / name).write_text(f"#!/bin/sh\n{ask}" + ("exit 1\n" if name == fails else ""))
        (binaries / name).chmod(0o755)
    environment = os.environ | {"PIP_INDEX_URL": "https://ada:hunter2@example.com/simple"}
    copy(("Makefile", "pyproject.toml", "requirements-dev.lock", "requirements-model.lock"), tmp_path)
    (tmp_path / ".venv").mkdir()
    done = subprocess.run(
        ["make", "install", f"BIN={binaries}"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "hunter2" not in done.stdout + done.stderr
    asked = seen.read_text()
    assert "--no-deps --requirement requirements-dev.lock https://ada:hunter2@example.com/simple\n" in asked
    by_pip = [line for line in asked.splitlines() if line.startswith("python -m pip install")]
    assert any("--requirement requirements-dev.lock" in line for line in by_pip) == (fails == "uv")


def parts_of_the_page():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.findall(
        r"^\| `(\w+)` \|", page.partition("| part of `make proofs` |")[2].partition("\n\n")[0], re.MULTILINE
    )


def test_every_part_of_the_proofs_is_explained_and_every_slow_test_is_in_one():
    assert parts_of_the_page() == list(proofs.PARTS)
    folders = [folder for group in proofs.FOLDERS.values() for folder in group]
    assert len(folders) == len(set(folders))
    assert [folder for folder in folders if not (ROOT / "tests" / folder).is_dir()] == []
    assert proofs.recorded().keys() <= proofs.PARTS.keys()


def test_only_a_green_part_of_committed_files_is_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(proofs, "ROOT", tmp_path)
    monkeypatch.setattr(proofs, "RECORD", tmp_path / "tests" / "proofs.json")
    monkeypatch.setattr(proofs, "PARTS", {"chaos": ["true"], "fuzz": ["false"]})
    (tmp_path / "tests").mkdir()
    named = ["-c", "user.name=a", "-c", "user.email=a"]
    for words in (["init", "-q"], [*named, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "changed").touch()
    assert proofs.main(["chaos"]) == 0
    assert "chaos: not recorded, because files are not committed: ?? changed" in capsys.readouterr().out
    (tmp_path / "changed").unlink()
    assert proofs.main([]) == 1
    assert "red: fuzz" in capsys.readouterr().err
    assert proofs.recorded().keys() == {"chaos"}
    assert proofs.recorded()["chaos"]["commit"] == proofs.git("rev-parse", "HEAD")


@pytest.mark.parametrize(
    ("program", "given", "options"),
    [
        ("chaos", {"FAULTS": 60, "SEED": 991, "JOBS": 2}, " --faults 60 --seed 991 --jobs 2"),
        ("chaos", {"SEED": 0}, " --seed 0"),
        ("fuzz", {"INPUTS": 60, "SEED": 7, "JOBS": 2}, " --inputs 60 --seed 7 --jobs 2"),
    ],
)
def test_chaos_and_fuzz_pass_the_variables_that_are_set(program, given, options):
    assert lines(program)[-1] == f"python -m tests.{program}"
    assert lines(program, **given)[-1] == f"python -m tests.{program}{options}"


def test_help_lists_the_commands_for_a_cluster():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"remote", "register", "package", "doctor"} <= {
        line.split()[0] for line in done.stdout.splitlines()
    }


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The protos by kind and name, and the file names of the code archive, of a package made in a clean
    checkout."""
    folder = tmp_path_factory.mktemp("package")
    copy(tracked(), folder / "checkout")
    line = lines("package", PACKAGE=str(folder / "package.tgz"))[-1].split()
    line[0] = str(Path(sys.executable).with_name(line[0]))
    environment = os.environ | {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONPATH": str(folder / "checkout"),
    }
    done = subprocess.run(
        line, cwd=folder / "checkout", env=environment, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {"1": {}, "2": {}, "3": {}}
    kinds = {"1": task_pb2.TaskSpec, "2": workflow_pb2.WorkflowSpec, "3": launch_plan_pb2.LaunchPlan}
    with tarfile.open(folder / "package.tgz") as archive:
        # Pythons before 3.11.4 have no filters; the archive was made a moment ago.
        archive.extractall(
            folder / "protos", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    for file in (folder / "protos").glob("*.pb"):
        kind = file.stem[-1]
        proto = kinds[kind].FromString(file.read_bytes())
        found[kind][proto.id.name if kind == "3" else proto.template.id.name] = proto
    (code,) = (folder / "protos").glob("fast*.tar.gz")
    with tarfile.open(code) as archive:
        return found, {name.removeprefix("./") for name in archive.getnames()}


def test_the_package_has_every_shape_s_tasks_workflows_and_launch_plans(package):
    (tasks, workflows, plans), _ = package[0].values(), package[1]
    shapes = load_shapes()
    assert {f"tasks.evaluate.evaluate_model_{shape.identifier}" for shape in shapes} <= set(tasks)
    assert {f"tasks.train.train_{shape.identifier}" for shape in shapes} <= set(tasks)
    assert {"workflows.finetune.finetune", "workflows.sweep.sweep"} <= set(workflows)
    assert {"nightly", "weekly", "workflows.finetune.finetune"} <= set(plans)


def test_the_package_s_code_has_the_files_of_pods_and_none_of_the_laptop(package):
    _, names = package
    assert {
        "shapes.yaml",
        "cluster.yaml",
        "tasks/train.py",
        "flytune/models/base_models.json",
        "deepspeed_configs/zero3.json",
    } <= names
    assert not [name for name in names if name.startswith((".venv", ".git/", "tests", ".demo"))]
    task = next(iter(package[0]["1"].values()))
    assert "pyflyte-fast-execute" in task.template.k8s_pod.pod_spec["containers"][0]["args"]
