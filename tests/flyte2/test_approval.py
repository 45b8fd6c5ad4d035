"""A person's answer on Flyte 2: a condition, its timeout, and an artifact that was swapped meanwhile."""

import asyncio
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from flyte.errors import ConditionTimedoutError
from flyte.io import Dir

from flyte2 import approval as adapter
from flyte2.runtime.orchestrator import Flyte2
from flytune import cli
from flytune.errors import ExportError
from flytune.recipe import Recipe
from flytune.records.contents import CONTENTS
from flytune.registry import approval
from flytune.stages.approval import ask_person, take_answer
from flytune.stages.orchestrator import Folder
from flytune.stages.table import ASK
from tests.support.approvals import write_artifact
from tests.support.flyte2 import FIRST, run1, run2
from tests.support.flyte2_actions import PAUSED, SUCCEEDED
from tests.support.flyte2_plane import configured, plane2
from tests.support.paths import ROOT
from tests.support.tiny import cluster_recipe, tiny_base, tiny_recipe, write_pairs


@pytest.fixture
def asked(tmp_path):
    """An artifact that waits for an answer."""
    address = write_artifact(tmp_path / "made")
    recipe = Recipe.from_yaml(tmp_path / "made" / "recipe.yaml")
    return recipe, address, approval.ask(address, recipe, publish_to=str(tmp_path / "store"))


@pytest.fixture
def answered(asked, monkeypatch):
    """A function that returns the outcome of an answer, in an action of a run whose stages are called here.

    The SDK's condition is a stand-in: None as an answer is the timeout that the backend raises.
    """
    recipe, address, question = asked
    orchestrator, told = Flyte2("raw", f"{Path(address).parent}/run", ("run",), "run1"), []
    monkeypatch.setattr(Flyte2, "shared_address", lambda self, name: None)

    def call(stage):
        async def run(artifact, **inputs):
            folder = Folder.here(Path(artifact.path))
            shown = told.append
            function = ask_person if stage is ASK else take_answer
            return function(orchestrator, shown, artifact=folder, **inputs)

        return run

    def outcome(answer):
        async def wait():
            said = answer() if callable(answer) else answer
            if said is None:
                raise ConditionTimedoutError("Condition was not signaled within the timeout period.")
            return said

        async def new_condition(name, **about):
            assert name == question.name
            assert about["data_type"] is str
            assert about["timeout"].total_seconds() == 72 * 3600
            return SimpleNamespace(wait=SimpleNamespace(aio=wait))

        monkeypatch.setattr("flyte.new_condition", SimpleNamespace(aio=new_condition))
        monkeypatch.setattr(adapter, "current", lambda: orchestrator)
        monkeypatch.setattr(adapter, "call", call)
        pending = {question.name: SimpleNamespace(name="action7")}
        monkeypatch.setattr(adapter, "get_controller", lambda: SimpleNamespace(_pending_conditions=pending))
        return asyncio.run(adapter.outcome(recipe, Dir(path=address)))

    return outcome


def test_a_yes_publishes_and_the_question_names_the_action_and_the_report(answered, asked, tmp_path, capsys):
    assert "published at " in answered("yes, Ada")
    assert len(list((tmp_path / "store").iterdir())) == 1
    told = capsys.readouterr().out
    assert "flyte signal condition run1 action7 'yes, YOUR NAME'" in told
    assert approval.link(asked[1]) in told
    assert approval.recorded(asked[1]).answers[0].by == "", "the backend keeps no name"


@pytest.mark.parametrize(
    ("answer", "why"), [("no, Ada: rude", "'no, Ada: rude'"), (None, "no answer within 72 hours")]
)
def test_a_no_and_a_timeout_end_the_run_with_the_model_stored(answered, answer, why, tmp_path):
    outcome = answered(answer)
    assert why in outcome
    assert "neither published nor accepted; to publish or accept it after all: flytune approve " in outcome
    assert not (tmp_path / "store").exists()


def test_another_artifact_at_the_address_is_not_approved(answered, asked, tmp_path):
    def swap():
        (Path(asked[1]) / CONTENTS).write_text('{"files": []}')
        return "yes"

    with pytest.raises(ExportError, match="and the answer is about"):
        answered(swap)
    assert not (tmp_path / "store").exists()


def test_without_a_question_nobody_is_asked(tmp_path):
    artifact = Dir(path=write_artifact(tmp_path / "made"))
    assert asyncio.run(adapter.outcome(Recipe.from_yaml(tmp_path / "made" / "recipe.yaml"), artifact)) is None


@pytest.mark.journey
@pytest.mark.parametrize("face", [1, 2])
def test_without_a_terminal_a_run_here_leaves_the_artifact_to_a_command(face, home2, capfd):
    from flyte2.finetune import finetune
    from flyte2.runtime import local

    for worker in (FIRST, local.WORKER):
        worker.end()  # one that an earlier test has started prints elsewhere
    base, rows = tiny_base(home2), write_pairs(home2 / "pairs.jsonl", 64)
    publish = {"address": str(home2 / "store"), "approval": {"hours": 72}}
    recipe = Recipe.model_validate(tiny_recipe(base, rows, {"training.max_steps": 2, "publish": publish}))
    artifact = run1(recipe) if face == 1 else run2(finetune, recipe=recipe).path
    assert not (home2 / "store").exists()
    (command,) = re.findall(r"flytune (approve .* --sha256 [0-9a-f]{64})", capfd.readouterr().out)
    assert cli.main(shlex.split(command)) == 0
    (published,) = (home2 / "store").iterdir()
    assert (published / CONTENTS).read_bytes() == (Path(artifact) / CONTENTS).read_bytes()


@pytest.mark.slow
def test_a_run_pauses_until_the_command_of_its_question_answers_it(tmp_path):
    base, rows = tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64)
    publish = {"address": "s3://flyte/store", "approval": {"hours": 72}}
    recipe = cluster_recipe(base, rows, {"training.max_steps": 2, "publish": publish})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def command(program, *arguments):
        path = Path(sys.executable).with_name(program)
        done = subprocess.run(
            [path, *map(str, arguments)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done.returncode, done.stdout + done.stderr

    with plane2(tmp_path) as plane:
        settings = {"HOME": str(tmp_path), "FLYTECTL_CONFIG": str(configured(plane, tmp_path))}
        environment = os.environ | plane.storage | settings
        signals = []

        def paused():
            return [action for action in plane.executor.actions.values() if action.phase == PAUSED]

        def answer():
            with plane.executor.changed:
                plane.executor.changed.wait_for(paused, timeout=500)
            (condition,) = paused()
            assert plane.below("store") == []
            signals.append(command("flyte", "signal", "condition", "first", condition.id.name, "yes, Ada"))

        thread = threading.Thread(target=answer)
        thread.start()
        code, said = command(
            "flytune", "run", tmp_path / "recipe.yaml", "--flyte2", "--remote", "--name", "first"
        )
        thread.join()
        assert code == 0, said[-4000:]
        assert [code for code, _ in signals] == [0], signals
        assert {one.phase for one in plane.executor.of_run("first")} == {SUCCEEDED}
        assert any(key.endswith("/approval.jsonl") for key in plane.below("store"))
