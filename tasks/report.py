"""Report of a failed run: the cause, the advice, and the checkpoint from which it can resume."""

import html
import logging
import os

from flytekit import Deck, Resources, task
from flytekit.types.error.error import FlyteError

from flytune.artifacts import notify
from flytune.failures import FailureText
from flytune.recipe import Recipe
from flytune.training import PhaseNote, phase_notes
from flytune.training.checkpoints import find
from images import LIGHT
from tasks.runtime import messages
from tasks.runtime.directories import attempt_notes_addresses, is_local, with_checkpoint_folder
from tasks.runtime.schema import without_schema
from tasks.runtime.secrets import secrets
from tasks.runtime.volumes import light_pod

log = logging.getLogger(__name__)


@without_schema
@task(
    container_image=LIGHT,
    pod_template=light_pod(),
    requests=Resources(cpu="1", mem="1Gi"),
    enable_deck=True,
    deck_fields=(),
    secret_requests=secrets("notify"),
)
def report_failure(recipe: Recipe, err: FlyteError | None = None) -> None:
    """Report the failure in the log, in a deck, and to the recipe's webhook; raise nothing."""
    try:
        recipe = with_checkpoint_folder(recipe)
        checkpoint = find.described(recipe)
        text = _failure_text(recipe, err, checkpoint)
        # On this machine pyflyte shows the error afterwards.
        log.error("%s", f"{recipe.name}: failed. {checkpoint}" if is_local() else text)
        Deck("Failure", f"<pre>{html.escape(str(text))}</pre>")
        notify.send(recipe, "failed", text.within(notify.LONGEST))
    except Exception:  # raised, it would hide the run's own error
        log.exception("%s: failed, and the failure could not be reported", recipe.name)


def _failure_text(recipe: Recipe, err: FlyteError | None, checkpoint: str) -> FailureText:
    """Return the failure with the task's name, the sentence on the newest `checkpoint`, and the log's address."""
    text = messages.parse_message(err.message if err else "")
    lines, failed = list(text.further), text.task
    execution = os.environ.get("FLYTE_INTERNAL_EXECUTION_ID", "")
    if not failed and (killed := _note_of_killed_pod(recipe, execution)):
        # A killed process stores no error; its last phase note names the task.
        failed = killed.task
        lines.append(f"last seen: {killed}")
    if not failed and err and not is_local() and not err.failed_node_id.startswith("fn"):
        # On a cluster, Flyte names the node of this task itself: fn0.
        failed = f"node {err.failed_node_id}"
    lines.append(checkpoint)
    if execution and not any(line.startswith("log: ") for line in lines):
        page = os.environ.get("FLYTE_EXECUTION_URL", "").partition("/nodeId/")[0]
        lines.append(f"log: the console's page of execution {execution} {page}".rstrip())
    sentence = f"{recipe.name}: {failed or 'the run'} failed: {text.sentence}"
    return FailureText(sentence, text.advice, further=tuple(lines), details=text.details)


def _note_of_killed_pod(recipe: Recipe, execution: str) -> PhaseNote | None:
    """Return the last phase note of this execution's killed pods."""
    if not execution:
        return None
    found = [
        note
        for address in [*find.addresses(recipe), *attempt_notes_addresses(execution)]
        for note in phase_notes.read(address, execution)
    ]
    return max((note for note in found if note.was_killed), key=lambda note: note.attempt, default=None)
