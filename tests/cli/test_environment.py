"""Commands in a process whose output, working folder or memory is gone: one line, and no traceback."""

import shutil
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

RELEASE = ROOT / "tests/support/releases/0.1.0"
COMMANDS = {
    "accepted": ["accepted", "."],
    "approve": ["approve", "."],
    "adapters": ["adapters", str(RELEASE / "artifact")],
    "calibrate": ["calibrate", str(RELEASE / "artifact")],
    "completion": ["completion"],
    "chat": ["chat", str(RELEASE / "artifact"), "--base", "base"],
    "combine": ["combine", "OUT", str(RELEASE / "artifact"), str(RELEASE / "artifact")],
    "convert": ["convert", "axolotl.yaml"],
    "debug": ["debug", "abcdefghij"],
    "doctor": ["doctor"],
    "fetch": ["fetch", "memory://nowhere/artifact", "OUT"],
    "gguf": ["gguf", str(RELEASE / "artifact"), "--out", "OUT"],
    "merge": ["merge", str(RELEASE / "artifact"), "--out", "OUT"],
    "init": ["init", "data.jsonl", "--yes", "--base", "base", "--out", "OUT"],
    "infer": ["infer", str(RELEASE / "artifact"), "--base", "base", "--prompts", "data.jsonl"],
    "plan": ["plan", "recipe.yaml", "--json"],
    "reproduce": ["reproduce", str(RELEASE / "artifact"), "--with", str(RELEASE / "artifact")],
    "run": ["run", "nothing.yaml"],
    "schema": ["schema"],
    "selftest": ["selftest", "--pairs", "full/none", "--json"],
    "verify": ["verify", "http://127.0.0.1:1", str(RELEASE / "artifact")],
    "xray": ["xray", "recipe.yaml", "--rows", "20", "--out", "OUT"],
}
"""A call of each command."""


def called(command, folder, before="", after=""):
    """Return the end of a command that a shell starts in a folder, with words before and after it."""
    arguments = " ".join(f"'{one.replace('OUT', str(folder / 'out'))}'" for one in COMMANDS[command])
    text = f"{before} '{sys.executable}' -m flytune.cli {arguments} {after}"
    return subprocess.run(["bash", "-c", text], cwd=folder, capture_output=True, text=True, timeout=540)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    work = tmp_path / "work"
    shutil.copytree(RELEASE / "base", work / "base")
    shutil.copyfile(RELEASE / "data.jsonl", work / "data.jsonl")
    shutil.copyfile(RELEASE / "artifact" / "recipe.yaml", work / "recipe.yaml")
    text = (
        "base_model: a/b\n"
        "datasets: [{path: rows.jsonl, type: alpaca}]\n"
        "learning_rate: 0.001\n"
        "micro_batch_size: 1\n"
    )
    (work / "axolotl.yaml").write_text(text)
    return work


def test_there_is_a_call_of_each_command():
    done = subprocess.run(
        [sys.executable, "-m", "flytune.cli", "nothing"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    listed = done.stderr.partition("choose from ")[2].partition(")")[0]
    assert {one.strip(" '") for one in listed.split(",")} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_with_a_closed_output_each_command_ends_before_its_work(command, folder):
    done = called(command, folder, after=">&-")
    assert (done.returncode, done.stderr) == (
        1,
        "RecipeError: the standard output is closed: open it (>FILE, or >/dev/null)\n",
    )
    assert not (folder / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_in_a_deleted_folder_each_command_ends_before_its_work(command, folder):
    done = called(command, folder, before=f"rm -r '{folder}';")
    assert (done.returncode, done.stderr) == (
        1,
        "RecipeError: the working folder was deleted: change to one that exists (cd)\n",
    )


# The others write to their output after minutes of work, or nothing.
@pytest.mark.parametrize(
    "command", ["accepted", "adapters", "calibrate", "convert", "plan", "reproduce", "schema"]
)
def test_a_full_output_is_an_error(command, folder):
    done = called(command, folder, after=">/dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("RecipeError: No space left on device: make room in ")
    assert done.stderr.count("\n") == 1


# So little that torch and pyarrow cannot be mapped; their errors are not MemoryErrors.
@pytest.mark.parametrize("command", ["adapters", "merge", "xray"])
def test_without_memory_a_command_ends_in_words_or_well(command, folder):
    done = called(command, folder, before=f"ulimit -v {400 * 1024};")
    assert "Traceback" not in done.stderr
    if command == "adapters":
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(
            "RecipeError: out of memory: this process gets no more: free some"
        )
