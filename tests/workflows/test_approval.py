"""A person's answer on Flyte 1: the nodes of a task that asks, and none where nothing is asked."""

import shutil
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
from flytekit import FlyteContextManager
from flytekit.models.literals import LiteralMap
from flytekit.models.task import TaskSpec
from flytekit.tools.translator import get_serializable
from flytekit.types.error.error import FlyteError

from flytune.recipe import Recipe
from flytune.records.approval import PAGE
from flytune.records.contents import CONTENTS
from flytune.registry import approval as registry
from flytune.registry import history
from flytune.stages.orchestrator import Folder
from tasks.approval import ask_person, take_answer
from tasks.promote import promote_challenger
from tasks.report import report_failure
from tasks.runtime import approval
from tasks.runtime.orchestrator import Flyte
from tasks.store import store_artifact
from tests.support import execution
from tests.support.approvals import write_artifact
from tests.support.decisions import decision
from tests.support.propeller import PodFailed
from tests.support.registration import SETTINGS
from workflows.finetune import finetune
from workflows.refresh import challenge, refresh, train_challenger

TASKS = {task.name: task for task in (ask_person, take_answer, report_failure)}
BEFORE = {
    finetune: "make_plan fetch_base_model prepare_data branch:reference branch:train branch:evaluate "
    "branch:harness store_artifact",
    challenge: "workflows.refresh.train_challenger branch:compare promote_challenger",
    refresh: "decide_refresh branch:refresh",
}
BEFORE[train_challenger] = BEFORE[finetune]
"""Nodes of the workflows of a release that asked nobody."""


@pytest.mark.parametrize("workflow", BEFORE, ids=lambda one: one.name.rpartition(".")[2])
def test_no_node_is_there_for_a_question_that_is_not_asked(workflow):
    made = OrderedDict()
    template = get_serializable(made, SETTINGS, workflow).template.to_flyte_idl()
    assert " ".join(map(name_of, template.nodes)) == BEFORE[workflow]
    tasks = [one.template.id.name for one in made.values() if isinstance(one, TaskSpec)]
    assert not {ask_person.name, take_answer.name} & set(tasks)


def name_of(node):
    kind = node.WhichOneof("target")
    if kind == "branch_node":
        return f"branch:{node.metadata.name}"
    return node.workflow_node.sub_workflow_ref.name or node.task_node.reference_id.name.rpartition(".")[2]


class Pods:
    """Run of a job whose tasks are called in this process."""

    def __init__(self, answer):
        self.answer, self.taken, self.name = answer, {}, "run1"
        self.admin = SimpleNamespace(note=lambda *_: None)

    def run_task(self, task, inputs, path, name):
        literals = LiteralMap.from_flyte_idl(execution.literals_pb2.LiteralMap(literals=inputs))
        made = TASKS[task.id.name].dispatch_execute(FlyteContextManager.current_context(), literals)
        return dict(made.to_flyte_idl().literals)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A cluster of this process, with an artifact in its storage."""
    monkeypatch.setattr(Flyte, "is_local", lambda self: False)
    monkeypatch.setattr(Flyte, "shared_address", lambda self, name: f"file://{tmp_path}/shared-{name}")
    monkeypatch.setattr(Flyte, "execution", lambda self: "run1")
    (tmp_path / "shared-questions").mkdir()
    address = write_artifact(tmp_path / "made")
    return tmp_path, address, Recipe.from_yaml(f"{address}/recipe.yaml")


@pytest.fixture(autouse=True)
def posted(monkeypatch):
    """Texts for the webhook."""
    texts = []
    monkeypatch.setattr("flytune.artifacts.notify.send", lambda recipe, kind, text: texts.append(text))
    return texts


def outputs(place, answer, task, made="", **asked):
    """Return the outputs of the job that a task ends as, which has asked about the artifact."""
    folder, address, recipe = place
    question = registry.ask(address, recipe, publish_to=f"{folder}/store", **asked)

    def answered(signal):
        assert signal == f"approve-{question.artifact_sha256[:12]}"
        return answer() if callable(answer) else answer

    context = FlyteContextManager.current_context().with_serialization_settings(SETTINGS)
    with FlyteContextManager.with_context(context):
        job = approval.asked(
            made or Folder.here(Path(address)), recipe, Folder.here(Path(address))
        ).to_flyte_idl()
    assert execution.errors(job, task.interface.to_flyte_idl().outputs) == []
    workflows, tasks = ({one.id.name: one for one in kind} for kind in (job.subworkflows, job.tasks))
    return execution._Graph(Pods(answered), job, {}, tasks, workflows).outputs()["o0"].scalar


def test_a_yes_publishes_and_the_task_returns_its_artifact(place, posted):
    folder, address, _ = place
    made = outputs(place, "yes, Ada: kind", store_artifact)
    assert Path(made.blob.uri, "model.safetensors").read_bytes() == b"weights"
    (published,) = (folder / "store").iterdir()
    question, answer = posted
    assert f"look at: {address}/{PAGE}" in question
    assert f"approve-{registry.recorded(address).question.artifact_sha256[:12]} of execution run1" in question
    assert f"published at {published}" in answer
    assert not list((folder / "shared-questions").iterdir())


def test_a_no_succeeds_unpublished_and_the_webhook_gets_the_reason(place, posted):
    outputs(place, "no, Ada: rude", store_artifact)
    assert "'no, Ada: rude'" in posted[-1]
    assert not (place[0] / "store").exists()


def swap(place):
    shutil.copy(Path(place[1]) / "report.html", Path(place[1]) / "model.safetensors")
    (Path(place[1]) / CONTENTS).write_text('{"files": []}')
    return "yes, Ada"


def test_another_artifact_at_the_address_is_not_approved(place):
    with pytest.raises(Exception, match="and the answer is about"):
        outputs(place, lambda: swap(place), store_artifact)
    assert not (place[0] / "store").exists()


def test_silence_fails_the_run_and_its_report_ends_with_where_the_model_is(place, posted):
    _, address, recipe = place
    with pytest.raises(PodFailed, match=r"task execution timeout \[259200s\] expired") as failed:
        outputs(place, None, store_artifact)
    # The failure node of finetune.
    report_failure(recipe=recipe, err=FlyteError(failed_node_id="fn0", message=str(failed.value)))
    question = registry.recorded(address).question
    last = posted[-1].splitlines()[-1]
    assert f"the model is stored at {address}, and neither published nor accepted" in last
    assert last.endswith(f": flytune approve {address} --sha256 {question.artifact_sha256}")
    assert "'no: no answer within 72 hours'" in posted[-1]


def promoted(place, answer):
    address, accepted = place[1], f"{place[0]}/accepted"
    made = outputs(place, answer, promote_challenger, "waits", accepted=accepted, decision=decision(address))
    return made.primitive.string_value, history.decisions_at(accepted)


def test_a_refresh_accepts_after_a_yes_and_its_own_failure_node_tells_of_silence(place, posted):
    said, (entry,) = promoted(place, "yes, Ada")
    assert "accepted at" in said
    assert (entry.outcome, entry.approval.words) == ("accepted", "yes, Ada")
    shutil.rmtree(place[0] / "accepted")
    with pytest.raises(PodFailed, match="timeout"):
        promoted(place, None)
    assert "flytune approve" in posted[-1].splitlines()[-1]
    (entry,) = history.decisions_at(f"{place[0]}/accepted")
    assert (entry.outcome, entry.approval.answer) == ("refused", "no")
