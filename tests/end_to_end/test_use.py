"""Tests of the commands and the Python of docs/use.md, in order, on a store of tiny adapters."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.paths import ROOT
from tests.support.stages import write_dataset
from tests.support.store import stored
from tests.support.tiny import tiny_base

PAGE = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
PROMPTS = [
    {"prompt": "The sum of 1 and"},
    {"messages": [{"role": "user", "content": "Add 1 and 2."}], "adapter": "long"},
    {"prompt": "The sum of 3 and", "adapter": "base"},
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("use")
    base = tiny_base(folder)
    dataset = write_dataset(folder / "dataset", base)
    for name, steps in (("short", 5), ("long", 20)):
        stored(folder / "store", base, dataset, name, steps=steps)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (folder / "home").mkdir()
    names = {
        "STORE": "store",
        "NEW": "new",
        "MERGED": "merged",
        "PROMPTS": "prompts.jsonl",
        "ANSWERS": "answers.jsonl",
    }
    return {name: str(folder / place) for name, place in names.items()} | {"HOME": str(folder / "home")}


def filled(text, places):
    return re.sub(r"\b(STORE|NEW|MERGED|PROMPTS|ANSWERS)\b", lambda found: places[found[0]], text)


def ran(command, places):
    environment = os.environ | {
        "HOME": places["HOME"],
        "TMPDIR": places["HOME"],
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }
    done = fork_server.run(command, ROOT, environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


@pytest.mark.journey
def test_the_commands(places):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    assert [line.split()[1] for line in lines] == ["adapters", "chat", "infer", "combine", "merge", "run"]
    said = {}
    for line in lines:
        program, *arguments = shlex.split(filled(line, places))
        said[arguments[0]] = ran([Path(sys.executable).with_name(program), *arguments], places)
    assert "short" in said["adapters"]
    assert json.loads((Path(places["NEW"]) / "combination.json").read_text())["how"] == "cat"
    assert (Path(places["MERGED"]) / "model.safetensors").is_file()
    answers = Path(said["run"].splitlines()[-1]) / "answers.jsonl"
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row.get("adapter") for row in rows] == [None, "long", "base"]
    assert all(row["finish_reason"] in ("stop", "length") and row["answer_tokens"] <= 16 for row in rows)
    # The workflow answers in two parts, and this machine in one batch.
    assert [json.loads(line) for line in Path(places["ANSWERS"]).read_text().splitlines()] == rows


@pytest.mark.slow
def test_the_python(places):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    code = filled("\n".join(blocks), places) + "\nprint(answers.shape[0], model.active_adapters)\n"
    (program := Path(places["HOME"]) / "program.py").write_text(code)
    assert "2 ['long']" in ran([program], places)
