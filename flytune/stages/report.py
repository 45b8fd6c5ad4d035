"""Report of a failed run: the cause, the advice, and the checkpoint from which it can resume."""

import html
import logging
import os

from flytune.artifacts import notify
from flytune.failures import FailureText
from flytune.recipe import Recipe
from flytune.records import NodeAttempt
from flytune.stages import approval, stored
from flytune.stages.orchestrator import Failed, Orchestrator, Report
from flytune.training import earlier_attempts
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
        elif recipe.checkpoints.save_steps and (checkpoint := find.newest(recipe)):
            # pyflyte shows the error afterwards.
            log.error("%s: failed; the same command resumes from %s", recipe.name, checkpoint)
        report(f"<pre>{html.escape(str(text))}</pre>")
        notify.send(recipe, "failed", text.within(notify.LONGEST))
    except Exception:  # raised, it would hide the run's own error
        log.exception("%s: failed, and the failure could not be reported", recipe.name)


def _failure_text(orchestrator: Orchestrator, recipe: Recipe, err: Failed, checkpoint: str) -> FailureText:
    """Return the failure with the task's name, the sentence on the newest `checkpoint`, and the log's
    address."""
    execution, left = orchestrator.execution(), _records(orchestrator, recipe)
    texts = [_text(record) for records in left for record in records if record.advice]
    text = next((text for text in reversed(texts) if text.is_in(err.message)), err.text)
    lines, failed = list(text.further), text.task
    last = [earlier_attempts.last_failed(records) for records in left]
    ended = [record for record in last if record is not None]
    if not failed and ended:
        # Neither a killed process nor a deleted job has an error of ours, and its pods' logs are gone.
        record = max(ended, key=lambda record: (earlier_attempts.was_killed(record), record.retry))
        failed = record.task
        if earlier_attempts.was_killed(record):
            lines.append(f"last seen: {record.last_seen}")
        lines += next(earlier_attempts.lines(records, execution) for records in left if record in records)
    if not failed and err.node and not orchestrator.is_local():
        failed = f"node {err.node}"
    lines.append(checkpoint)
    if execution and not any(line.startswith("log: ") for line in lines):
        page = os.environ.get("FLYTE_EXECUTION_URL", "").partition("/nodeId/")[0]
        lines.append(f"log: the console's page of execution {execution} {page}".rstrip())
    sentence = f"{recipe.name}: {failed or 'the run'} failed: {text.sentence}"
    return FailureText(sentence, text.advice, further=tuple(lines), details=text.details)


def _records(orchestrator: Orchestrator, recipe: Recipe) -> list[list[NodeAttempt]]:
    """Return the records that the pods of this execution have left, of each task."""
    if not (execution := orchestrator.execution()):
        return []
    addresses = (*find.addresses(recipe), *stored.attempt_addresses(orchestrator))
    return [earlier_attempts.read(address, execution) for address in addresses]


def _text(record: NodeAttempt) -> FailureText:
    return FailureText(record.reason, record.advice, record.task, tuple(record.further), record.details)
