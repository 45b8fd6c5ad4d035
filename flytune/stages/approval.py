"""Question to a person about a stored artifact, and what becomes of the answer."""

import json
from typing import NamedTuple

from flytune import json_core
from flytune.artifacts import notify
from flytune.console import step_lines
from flytune.errors import ExportError
from flytune.recipe import Recipe
from flytune.records.approval import PAGE
from flytune.registry import approval
from flytune.stages.orchestrator import Folder, Orchestrator, Report
from flytune.storage import Storage


class AnswerOutput(NamedTuple):
    """The artifact that was asked about, and what has become of it."""

    artifact: Folder
    outcome: str


def ask_person(orchestrator: Orchestrator, report: Report, recipe: Recipe, artifact: Folder, how: str) -> str:
    """Show the question beside an artifact, and post it to the recipe's webhook; return it.

    `how` says how to answer.
    """
    question = _question(artifact.address).question
    text = approval.text(question, artifact.address, how)
    report(_page(artifact.address))
    step_lines.show(text)
    notify.send(recipe, "approval", text)
    if (note := _note(orchestrator)) is not None:
        note.write("", json.dumps({"artifact": artifact.address}).encode())
    return text


def take_answer(
    orchestrator: Orchestrator,
    report: Report,
    recipe: Recipe,
    artifact: Folder,
    sha256: str,
    answer: str,
    by: str,
) -> AnswerOutput:
    """Publish and accept the artifact if it is the one of the hash `sha256` and the answer is a yes; record
    the answer.

    `by` is the person's name, as far as the platform knows it.

    Raises:
        ExportError: another artifact is there now, or it cannot be published.
    """
    settled = approval.settle(artifact.address, sha256, answer, by)
    report(_page(artifact.address))
    step_lines.show(settled.text)
    notify.send(recipe, "approval", settled.text)
    note = _note(orchestrator)
    if note is not None and note.exists():
        note.remove("")
    return AnswerOutput(artifact, settled.text)


def left_open(orchestrator: Orchestrator, sentence: str) -> str:
    """Record that a question of this failed execution got no answer; return what the failure's text is to end
    with.

    Returns: where the model is, and how to approve it after all; empty if no question was open.
    """
    note = _note(orchestrator)
    if note is None or not note.exists():
        return ""
    address = json_core.load_object(note.read())["artifact"]
    record = _question(address)
    if not record.answers:
        question = record.question
        words = (
            question.timeout if "timeout" in sentence else f"no: the run ended without an answer: {sentence}"
        )
        try:
            approval.settle(address, question.artifact_sha256, words)
        except ExportError as error:  # another artifact is there now
            return str(error)
    return approval.unpublished(_question(address), address)


def _question(address: str) -> approval.Recorded:
    record = approval.recorded(address)
    if record is None:
        raise ExportError(f"{address}: nobody was asked about this artifact; run the recipe again")
    return record


def _page(address: str) -> str:
    return Storage(address, "", error=ExportError).read(PAGE).decode()


def _note(orchestrator: Orchestrator) -> Storage | None:
    """Return the file that names the artifact of this execution's question; None on this machine."""
    root = orchestrator.shared_address("questions")
    return (
        None
        if root is None or not orchestrator.execution()
        else Storage(f"{root}/{orchestrator.execution()}.json", "")
    )
