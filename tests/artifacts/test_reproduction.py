"""Second runs of artifacts: what is compared, and what is refused before training."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flytune.artifacts import reproduction
from flytune.errors import DataError, ExportError
from flytune.recipe import Recipe
from flytune.records import TrainingResult
from tests.fuzz.artifacts import ARTIFACT, reseal
from tests.support import waiting
from tests.support.paths import ROOT
from tests.support.pyflyte import pyflyte
from tests.support.reproduction import reproduce, results
from tests.support.stages import seal
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the artifact of a run, and the data that it was trained on."""
    folder = tmp_path_factory.mktemp("first")
    rows = write_pairs(folder / "pairs.jsonl", 64)
    done = pyflyte(tiny_recipe(tiny_base(folder), rows, {"publish.address": str(folder / "store")}), folder)
    assert done.returncode == 0, done.stderr[-3000:]
    (artifact,) = (folder / "store").iterdir()
    return artifact, rows


def copy_of(artifact, folder):
    """Copy an artifact, without links to its files."""
    return shutil.copytree(artifact, folder)


@pytest.mark.slow
def test_a_second_run_is_equal_bit_for_bit(made, tmp_path):
    done = reproduce(made[0], "--out", tmp_path / "again", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    found = reproduction.Reproduction.model_validate_json(done.stdout)
    assert set(results(found).values()) == {"equal"}
    assert results(found).keys() >= {
        "recipe",
        "prepared data",
        "tokenizer",
        "base model",
        "software",
        "losses",
        "weights",
    }


@pytest.mark.slow
def test_differences_are_named_with_their_size(made, tmp_path):
    from safetensors.torch import load_file, save_file

    second = copy_of(made[0], tmp_path / "second")
    weights = load_file(second / "model.safetensors")
    name = sorted(weights)[0]
    weights[name] = weights[name] + 1e-3
    (second / "model.safetensors").unlink()
    save_file(weights, second / "model.safetensors")
    training = TrainingResult.read(second / "training.json")
    steps = [
        training.steps[0],
        *(step.model_copy(update={"loss": step.loss + 1e-5}) for step in training.steps[1:]),
    ]
    versions = training.versions | {"torch": "0.0"}
    training.model_copy(update={"steps": steps, "versions": versions}).write(second / "training.json")
    seal(second)
    done = reproduce(made[0], "--with", second)
    assert done.returncode == 3, done.stderr
    found = reproduction.compare(made[0], second)
    assert results(found)["version of torch"] == "different"
    assert results(found)["losses"] == "near"
    said = {finding.name: finding.second for finding in found.findings}
    assert said["losses"].startswith("differ from step 2, by 1e-05 at most")
    assert said["weights"].endswith(f"by 1.00e-03 at most ({name})")
    assert "differ from step 2" in done.stdout


@pytest.mark.slow
def test_other_data_is_refused_before_training(made, tmp_path):
    artifact, _ = made
    recipe = reproduction.recipe_of(artifact)
    reproduction.check_data(artifact, recipe)
    changed = recipe.data.model_copy(update={"path": str(write_pairs(tmp_path / "pairs.jsonl", 60))})
    with pytest.raises(
        DataError, match=r"its hash was \w{12}, and is \w{12} \(it had 64 rows, and has 60\); restore it"
    ):
        reproduction.check_data(artifact, recipe.model_copy(update={"data": changed}))
    gone = recipe.data.model_copy(update={"path": str(tmp_path / "gone.jsonl")})
    with pytest.raises(DataError, match="no such file or folder"):
        reproduction.check_data(artifact, recipe.model_copy(update={"data": gone}))


@pytest.mark.slow
def test_the_recipe_publishes_and_resumes_nothing_and_the_remote_command_is_printed(made, tmp_path):
    recipe = reproduction.recipe_of(made[0])
    assert (recipe.publish.address, recipe.checkpoints.folder, recipe.hardware.shape) == (None, None, "cpu-1")
    done = reproduce(made[0], "--remote", "--out", tmp_path / "out")
    assert done.returncode == 0
    assert f"flytune run {tmp_path}/out/recipe.yaml --remote\n" in done.stdout


def test_no_artifact_and_a_used_folder_are_refused(tmp_path):
    with pytest.raises(ExportError, match="there is no artifact, or an incomplete one"):
        reproduction.recipe_of(tmp_path)
    (tmp_path / "x").touch()
    with pytest.raises(ExportError, match="not empty; give a new folder"):
        reproduction.run_again(None, tmp_path)


def test_a_teacher_is_at_its_commit_and_compared(tmp_path):
    folders = [copy_of(ARTIFACT, tmp_path / name) for name in ("first", "second")]
    for folder, commit in zip(folders, ("a" * 40, "b" * 40), strict=True):
        recipe = Recipe.from_yaml(folder / "recipe.yaml").model_dump(mode="json")
        recipe["objective"] = {"name": "distill", "teacher_model_name_or_path": "owner/teacher"}
        (folder / "recipe.yaml").write_text(Recipe.model_validate(recipe).to_yaml())
        training = TrainingResult.read(folder / "training.json")
        training.model_copy(update={"teacher_commit": commit}).write(folder / "training.json")
        reseal(folder, "artifact.json")
    base = str(tmp_path)
    assert reproduction.recipe_of(folders[0], base=base).objective.teacher_model_revision == "a" * 40
    findings = {finding.name: finding for finding in reproduction.compare(*folders).findings}
    assert findings["teacher"].result == "different"
    assert (findings["teacher"].first, findings["teacher"].second[:40]) == ("a" * 40, "b" * 40)
    assert "teacher" not in results(reproduction.compare(ARTIFACT, ARTIFACT))


def test_a_second_run_ends_by_itself_after_ctrl_c():
    class Run:
        is_ending = False

        def wait(self):
            if self.is_ending:
                return 130
            self.is_ending = True
            raise KeyboardInterrupt

    assert reproduction._ended(Run()) == 130


@pytest.mark.parametrize(
    "content", [b"", b"\x02\x00\x00\x00\x00\x00\x00\x00{", b"\x02\x00\x00\x00\x00\x00\x00\x00[}"]
)
def test_weights_that_are_damaged_and_listed_so_are_refused(content, tmp_path):
    other = copy_of(ARTIFACT, tmp_path / "other")
    (other / "adapter_model.safetensors").write_bytes(content)
    for name in ("export.json", "artifact.json"):
        reseal(other, name)
    with pytest.raises(
        ExportError,
        match=r"adapter_model\.safetensors: truncated, or not a safetensors file .*; fetch the artifact",
    ):
        reproduction.compare(other, ARTIFACT)


RUN_AGAIN = """
import sys
from pathlib import Path
from flytune.artifacts import reproduction
from flytune.errors import ExportError
from flytune.recipe import Recipe
recipe, sys.executable, out = Recipe.from_yaml(sys.argv[1]), *sys.argv[2:]
try:
    reproduction.run_again(recipe, Path(out))
except ExportError as error:
    print(error)
"""


def _catches_sigterm(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)[1], 16)
    return caught >> (signal.SIGTERM - 1) & 1


def test_a_signal_to_the_command_alone_ends_its_run(tmp_path):
    """SIGTERM of a supervisor goes to one process; the run would train on without the command."""
    recipe, program, note = tmp_path / "recipe.yaml", tmp_path / "python", tmp_path / "process"
    recipe.write_text(yaml.safe_dump(tiny_recipe(tmp_path / "base", tmp_path / "rows.jsonl")))
    program.write_text(f"#!/bin/sh\necho $$ > {note}.partial; mv {note}.partial {note}; exec sleep 600\n")
    program.chmod(0o755)
    arguments = [recipe, program, tmp_path / "out"]
    command = [sys.executable, "-c", RUN_AGAIN, *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        waiting.until(lambda: note.exists() and _catches_sigterm(process))
        process.terminate()
        printed, _ = process.communicate()
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)
    assert printed == "tiny: the second run failed (exit code -15); the error is shown above\n"
    assert process.returncode == 0
