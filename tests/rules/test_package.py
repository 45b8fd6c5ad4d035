"""Rules of the package: the wheel, its ranges and the locks, and the files beside it that name the
version."""

import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from datetime import date
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import flytune
from flytune.doctor import laptop
from tests.support.paths import ROOT
from tests.support.sources import copy, tracked
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = itertools.chain(*PROJECT["optional-dependencies"].values())
REQUIREMENTS = [Requirement(line) for line in [*PROJECT["dependencies"], *EXTRAS]]
SETTINGS = ("shapes.yaml", "cluster.yaml", "accelerators.yaml", "deepspeed_configs", "chat_templates")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of a copy of the checkout: setuptools leaves build/ and egg-info where it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    needed = [name for name in tracked() if not name.startswith(("tests/", "docs/", "benchmarks/"))]
    copy(needed, folder / "checkout")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-q",
        "-w",
        folder,
        ".",
    ]
    done = subprocess.run(command, cwd=folder / "checkout", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def site(wheel):
    """A folder that the wheel is unpacked in, and that is imported from where the wheel is installed."""
    zipfile.ZipFile(wheel).extractall(wheel.parent / "site")
    return wheel.parent / "site"


def names(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_flytune_and_its_estimator_alone(wheel):
    """tasks, workflows and images in site-packages would hide those of a user's own Flyte project."""
    assert {name.partition("/")[0] for name in names(wheel)} == {"flytune", "training_estimates"}


def test_the_wheel_has_every_file_of_flytune_and_copies_of_the_settings(wheel):
    copies = {f"flytune/shipped/{name}" for name in tracked(*SETTINGS)}
    assert len(copies) > 10
    assert (
        names(wheel)
        == {*tracked("flytune", "training_estimates/*.py", "training_estimates/py.typed")} | copies
    )
    archive = zipfile.ZipFile(wheel)
    assert [
        name
        for name in copies
        if archive.read(name) != (ROOT / name.removeprefix("flytune/shipped/")).read_bytes()
    ] == []


def test_nothing_is_shipped_in_the_checkout_itself():
    """The folder shipped/ tells a wheel from a clone: in a clone it would hide the files that are edited."""
    assert not (ROOT / "flytune" / "shipped").exists()


def of_wheel(site, folder, *arguments, hidden=()):
    """Run a command of the wheel; neither the project's other packages can be imported, nor what is
    `hidden`."""
    absent = folder / "absent"
    absent.mkdir(exist_ok=True)
    # In each process that Python starts.
    (absent / "sitecustomize.py").write_text(
        "import sys\nclass Absent:\n def find_spec(self, name, path=None, target=None):\n"
        f"  if name.partition('.')[0] in {('tasks', 'workflows', 'images', *hidden)}: raise "
        "ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    code = (
        "import sys\n"
        "from flytune import cli\n"
        f"assert cli.__file__.startswith({str(site)!r})\n"
        "sys.exit(cli.main())"
    )
    path = os.pathsep.join([str(absent), str(site)])
    environment = os.environ | {
        "PYTHONPATH": path,
        "HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(folder),
    }
    # Those of the tests themselves.
    for name in ("FLYTUNE_OUT", "HF_HOME", "HF_HUB_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("recipe", ["llama-3.1-8b-qlora", "llama-3.3-70b-full-zero3-nvme"])
def test_the_wheel_plans_as_the_clone_does(recipe, site, tmp_path):
    asked = ["plan", ROOT / "recipes" / f"{recipe}.yaml", "--samples", "10000", "--json"]
    made = of_wheel(site, tmp_path, *asked)
    assert made.returncode == 0, made.stderr
    clone = subprocess.run(
        [sys.executable, "-m", "flytune.cli", *map(str, asked)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(made.stdout) == json.loads(clone.stdout)
    assert not (site / "flytune" / "calibration.yaml").exists()


@pytest.mark.slow
def test_the_wheel_checks_the_machine_without_files_of_a_clone(site, tmp_path):
    (tmp_path / "requirements.lock").write_text("nothing==1\n")
    (tmp_path / "requirements-light.lock").write_text("nothing==1\n")
    found = json.loads(of_wheel(site, tmp_path, "doctor", "--json").stdout)
    said = {one["what"]: one["said"] for one in found}
    assert said["packages"] == "not compared: the lock files are in a clone, and this is an installed package"
    assert re.fullmatch(r"\d+ shapes", said["shapes.yaml"])
    assert "recipes" not in said


def test_the_wheel_uses_the_settings_of_the_clone_that_it_is_used_in(site, tmp_path):
    for name in ("flytune/__init__.py", "workflows/finetune.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    copy(tracked(*SETTINGS), tmp_path)
    (tmp_path / "shapes.yaml").write_text("shapes: []\n")
    done = of_wheel(
        site, tmp_path, "plan", ROOT / "recipes" / "llama-3.1-8b-qlora.yaml", "--samples", "10000"
    )
    assert done.returncode == 1
    assert f"{tmp_path}/shapes.yaml: 1 mistake" in done.stderr


def test_the_wheel_s_schema_is_the_clone_s(site, tmp_path):
    assert of_wheel(site, tmp_path, "schema").stdout == (ROOT / "recipes" / "recipe.schema.json").read_text(
        encoding="utf-8"
    )


def test_what_needs_a_clone_says_so(site, tmp_path):
    done = of_wheel(site, tmp_path, "run", ROOT / "recipes" / "demo-qlora.yaml", "--remote")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "a run on a cluster needs a clone of Flytune with workflows/, tasks/ and images/" in done.stderr


@pytest.mark.slow
def test_the_wheel_alone_trains(site, tmp_path):
    """Outside of a clone and without flytekit: a run, and the second, which prepares nothing again."""
    recipe = tiny_recipe(
        tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 60), {"training.max_steps": 2}
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    weights = []
    for _ in range(2):
        done = of_wheel(site, tmp_path, "run", "recipe.yaml", hidden=("flytekit", "flyte", "flyteidl"))
        assert done.returncode == 0, done.stderr
        artifact = Path(done.stdout.splitlines()[-1])
        assert artifact.parent == tmp_path / "artifacts"
        weights.append((artifact / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert len(list(tmp_path.rglob("prepared/prepare-*"))) == 1
    assert list(tmp_path.rglob("flytune-run-*")) == []


def of_lock(lock):
    """Return the versions of a lock by name."""
    lines = re.findall(
        r"^([\w.-]+)(?:\[[^]]*\])?==([^\s;]+)", (ROOT / lock).read_text(encoding="utf-8"), re.MULTILINE
    )
    return {canonicalize_name(name): version for name, version in lines}


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-light.lock", "requirements-dev.lock"])
def test_the_lock_is_within_the_ranges(lock):
    locked = of_lock(lock)
    outside = [
        f"{requirement}: {locked[canonicalize_name(requirement.name)]}"
        for requirement in REQUIREMENTS
        if canonicalize_name(requirement.name) in locked
        and locked[canonicalize_name(requirement.name)] not in requirement.specifier
    ]
    assert outside == []


def test_every_lower_bound_is_at_most_what_was_tested():
    locked = of_lock("requirements-dev.lock")
    unknown = {canonicalize_name(requirement.name) for requirement in REQUIREMENTS} - set(locked)
    assert unknown == {"flytune", "mlflow-skinny"}, "a package that no lock has is not tested"


def test_only_what_is_measured_or_private_is_held_to_one_version():
    exact = {
        requirement.name
        for requirement in REQUIREMENTS
        if any(part.operator in ("==", "===") for part in requirement.specifier)
    }
    assert exact == {"torch", "lm-eval"}


def test_the_pythons_are_those_of_pyproject():
    supported = SpecifierSet(PROJECT["requires-python"])
    listed = {
        tuple(map(int, one.rpartition(" ")[2].split(".")))
        for one in PROJECT["classifiers"]
        if "Python :: 3." in one
    }
    assert listed == set(laptop.PYTHONS) == {(3, minor) for minor in range(30) if f"3.{minor}.0" in supported}


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", flytune.__version__)
    assert {"message", "title", "authors"} <= set(citation)
    released = date.fromisoformat(citation["date-released"])
    assert f"## [{flytune.__version__}] - {released}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert citation["license"] == PROJECT["license"]


def test_agents_md_is_short_and_leads_to_what_exists():
    lines = (ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60


def test_editors_are_offered_the_schema():
    settings = json.loads((ROOT / ".vscode" / "settings.json").read_text(encoding="utf-8"))["yaml.schemas"]
    for schema, patterns in settings.items():
        assert json.loads((ROOT / schema).read_text(encoding="utf-8"))["title"] == "Flytune recipe"
        assert all(list(ROOT.glob(pattern)) for pattern in patterns)
    first = "# yaml-language-server: $schema=recipe.schema.json\n"
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        assert recipe.read_text(encoding="utf-8").startswith(first), recipe.name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_ask_for_few_rights_and_pin_their_actions(path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert content["permissions"] in ({}, {"contents": "read"}), "rights are given to a job"
    triggers = content[True]  # YAML 1.1, as PyYAML reads it, takes `on` for true
    assert "pull_request_target" not in triggers
    for job in content["jobs"].values():
        for step in job["steps"]:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})", step.get("uses", "a/b@v1"))
            assert not re.search(r"\$\{\{\s*github\.(event|head_ref)", step.get("run", "")), (
                "text of others in a shell"
            )
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False
            if "make " in step.get("run", ""):
                targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
                assert set(re.findall(r"make ([a-z -]+)", step["run"])[0].split()) <= targets


def release():
    return yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))


def test_only_the_jobs_that_need_them_can_write():
    jobs = release()["jobs"]
    rights = {
        name: {right for right, kind in job["permissions"].items() if kind == "write"}
        for name, job in jobs.items()
    }
    assert rights == {
        "build": set(),
        "attest": {"id-token", "attestations"},
        "publish": {"id-token"},
        "notes": {"contents"},
    }
    needed = {name: job.get("needs") for name, job in release()["jobs"].items()}
    assert needed == {"build": None, "attest": "build", "publish": "attest", "notes": "publish"}
    assert "environment" in release()["jobs"]["publish"]
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


@pytest.mark.parametrize(
    ("tag", "error"),
    [
        (f"v{flytune.__version__}", ""),
        (
            "v9.9.9",
            f"tag v9.9.9, and flytune/__init__.py has {flytune.__version__}: tag the commit "
            f"v{flytune.__version__}",
        ),
        (flytune.__version__, "tag the commit v"),
    ],
)
def test_a_tag_that_is_not_the_version_is_refused(tag, error, tmp_path):
    (step,) = [
        step for step in release()["jobs"]["build"]["steps"] if "GITHUB_REF_NAME" in step.get("run", "")
    ]
    copy(("flytune/__init__.py", "CHANGELOG.md"), tmp_path)
    environment = os.environ | {"GITHUB_REF_NAME": tag}
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == int(bool(error))
    assert error in done.stderr
    if not error:
        notes = (tmp_path / "notes.md").read_text(encoding="utf-8")
        assert "### Added" in notes
        assert "\n## [" not in notes
