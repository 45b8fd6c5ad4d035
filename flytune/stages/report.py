"""Report of a failed run: the cause, the advice, and the checkpoint from which it can resume."""

import html
import logging
import os

from flytune.artifacts import notify
from flytune.failures import FailureText
from flytune.recipe import Recipe
from flytune.stages import approval, stored
from flytune.stages.orchestrator import Failed, Orchestrator, Report
from flytune.training import PhaseNote, earlier_attempts, phase_notes
from flytune.training.checkpoints import find

log = logging.getLogger(__name__)


def report_failure(orchestrator: Orchestrator, report: Report, recipe: Recipe, err: Failed) -> None:
    """Report the failure in the log, on a page, and to the recipe's webhook; raise nothing."""
    try:
        recipe = stored.with_checkpoint_folder(orchestrator, recipe)
        text = _failure_text(orchestrator, recipe, err, find.described(recipe))
        if left := approval.left_open(orchestrator, text.sentence):
            text = text._replace(further=(*text.further, left))
        if not orchestrator.is_local():
            log.error("%s", text)
        elif found := find.newest(recipe) if recipe.checkpoints.save_steps else None:
            # pyflyte shows the error afterwards.
            log.error("%s: failed; the same command resumes from %s", recipe.name, found)
        report(f"<pre>{html.escape(str(text))}</pre>")
        notify.send(recipe, "failed", text.within(notify.LONGEST))
    except Exception:  # raised, it would hide the run's own error
        log.exception("%s: failed, and the failure could not be reported", recipe.name)


def _failure_text(orchestrator: Orchestrator, recipe: Recipe, err: Failed, checkpoint: str) -> FailureText:
    """Return the failure with the task's name, the sentence on the newest `checkpoint`, and the log's address."""
    text, execution = err.text, orchestrator.execution()
    lines, failed = list(text.further), text.task
    if not failed and (last := _last_note(orchestrator, recipe)):
        # Neither a killed process nor a deleted job has an error of ours, and its pods' logs are gone.
        address, note = last
        failed = note.task
        if note.was_killed:
            lines.append(f"last seen: {note}")
        lines += earlier_attempts.lines(address, execution)
    if not failed and err.node and not orchestrator.is_local():
        failed = f"node {err.node}"
    lines.append(checkpoint)
    if execution and not any(line.startswith("log: ") for line in lines):
        page = os.environ.get("FLYTE_EXECUTION_URL", "").partition("/nodeId/")[0]
        lines.append(f"log: the console's page of execution {execution} {page}".rstrip())
    sentence = f"{recipe.name}: {failed or 'the run'} failed: {text.sentence}"
    return FailureText(sentence, text.advice, further=tuple(lines), details=text.details)


def _last_note(orchestrator: Orchestrator, recipe: Recipe) -> tuple[str, PhaseNote] | None:
    """Return the last phase note that this execution's failed pods have left, a killed one's first, with its address."""
    if not (execution := orchestrator.execution()):
        return None
    addresses = [*find.addresses(recipe), *stored.attempt_notes_addresses(orchestrator)]
    found = [(address, note) for address in addresses for note in phase_notes.read(address, execution)]
    return max(found, key=lambda one: (one[1].was_killed, one[1].attempt), default=None)
