"""Rules of the Makefile: the commands that its targets run, and a package that is really made."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from flyteidl.admin import launch_plan_pb2, task_pb2, workflow_pb2

from flytune.hardware import load_shapes
from tests.release import KEPT
from tests.support.make import lines
from tests.support.paths import ROOT


def test_remote_and_register_show_the_command_after_checking_plan_and_cluster():
    remote = "pyflyte run --remote --copy all --project p --domain d workflows/finetune.py finetune --recipe recipes/x.yaml"
    made = lines("remote", PROJECT="p", DOMAIN="d", RECIPE="recipes/x.yaml")
    asked = ["flytune plan recipes/x.yaml", "flytune doctor --remote --reach"]
    assert made[-4:] == [*asked, f'echo "{remote}"', remote]
    where = "--project flytesnacks --domain development --copy all --destination-dir ."
    register = f"pyflyte register {where} --version v1 workflows"
    assert lines("register", VERSION="v1")[-3:] == ["flytune doctor --remote --reach", f'echo "{register}"', register]
    assert "--version" not in lines("register")[-1]


def test_every_file_with_tests_that_run_before_a_release_alone_is_there():
    """The cases of a file that was moved would run for every change again."""
    assert [name for name in KEPT if not (ROOT / "tests" / name).is_file()] == []


NEW = ("--assume-new", "requirements-dev.lock")
"""Options of make by which nothing is installed yet."""


def test_torch_without_cuda_is_installed_before_the_lock():
    (version,) = {line for line in (ROOT / "requirements-dev.lock").read_text().split() if line.startswith("torch==")}
    made = [line for line in lines("install", *NEW, TORCH="cpu", BIN="nowhere/bin") if "pip install" in line]
    assert f'"{version}+cpu"' in made[0]
    assert "set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, or PIP_FIND_LINKS" in made[0]
    assert made[1].endswith("--constraint requirements-dev.lock torch")
    assert made[2].endswith("--no-deps --requirement requirements-dev.lock")
    plain = [line for line in lines("install", *NEW, BIN="nowhere/bin") if "pip install" in line]
    assert plain == made[1:]
    assert any(
        "TORCH=cu12: unknown; cpu, or leave it out" in line for line in lines("install", *NEW, TORCH="cu12", BIN="nowhere/bin")
    )


def test_chaos_passes_the_variables_that_are_set():
    assert lines("chaos")[-1] == "python -m tests.chaos"
    assert lines("chaos", FAULTS=60, SEED=991, JOBS=2)[-1] == "python -m tests.chaos --faults 60 --seed 991 --jobs 2"
    assert lines("chaos", SEED=0)[-1] == "python -m tests.chaos --seed 0"


def test_fuzz_passes_the_variables_that_are_set():
    assert lines("fuzz")[-1] == "python -m tests.fuzz"
    assert lines("fuzz", INPUTS=60, SEED=7, JOBS=2)[-1] == "python -m tests.fuzz --inputs 60 --seed 7 --jobs 2"


def test_help_lists_the_commands_for_a_cluster():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"remote", "register", "package", "doctor"} <= {line.split()[0] for line in done.stdout.splitlines()}


def test_without_a_cluster_doctor_says_how_to_start_one(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "FLYTECTL_CONFIG"} | {"HOME": str(tmp_path)}
    command = [sys.executable, "-m", "flytune.cli", "doctor", "--remote", "--reach"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "flytectl demo start" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The protos by kind and name, and the file names of the code archive, of a package made in a clean checkout."""
    folder = tmp_path_factory.mktemp("package")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.strip("\0").split("\0"):
        if (ROOT / name).is_file():
            (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "checkout" / name).write_bytes((ROOT / name).read_bytes())
    line = lines("package", PACKAGE=str(folder / "package.tgz"))[-1].split()
    line[0] = str(Path(sys.executable).with_name(line[0]))
    environment = os.environ | {"HOME": str(folder), "TMPDIR": str(folder), "PYTHONPATH": str(folder / "checkout")}
    done = subprocess.run(line, cwd=folder / "checkout", env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {"1": {}, "2": {}, "3": {}}
    kinds = {"1": task_pb2.TaskSpec, "2": workflow_pb2.WorkflowSpec, "3": launch_plan_pb2.LaunchPlan}
    with tarfile.open(folder / "package.tgz") as archive:
        # Pythons before 3.11.4 have no filters; the archive was made a moment ago.
        archive.extractall(folder / "protos", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
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
