"""What happened to a run that failed, in words, and what it can go on from."""

import html
import logging
import os

from flytekit import Deck, Resources, task
from flytekit.types.error.error import FlyteError

from flytune.artifacts import notify
from flytune.failures.text import FailureText
from flytune.recipe.recipe import Recipe
from flytune.training import phase_notes
from flytune.training.checkpoints import find
from flytune.training.phase_notes import PhaseNote
from images import LIGHT
from tasks.runtime import messages
from tasks.runtime.directories import attempts_of, is_local, placed
from tasks.runtime.schema import trimmed
from tasks.runtime.secrets import secrets

log = logging.getLogger(__name__)


@trimmed
@task(
    container_image=LIGHT,
    requests=Resources(cpu="1", mem="1Gi"),
    enable_deck=True,
    deck_fields=(),
    secret_requests=secrets("notify"),
)
def report_failure(recipe: Recipe, err: FlyteError | None = None) -> None:
    """Says it in the log, in a deck, and to the webhook where the recipe asks for that; raises nothing itself."""
    try:
        recipe = placed(recipe)
        kept = find.described(recipe)
        text = _described(recipe, err, kept)
        # On this machine the error follows, shown by pyflyte.
        log.error("%s", f"{recipe.name}: failed. {kept}" if is_local() else text)
        Deck("Failure", f"<pre>{html.escape(str(text))}</pre>")
        notify.send(recipe, "failed", text.within(notify.LONGEST))
    except Exception:  # it would hide the run's own error
        log.exception("%s: failed, and what there is to go on from could not be told", recipe.name)


def _described(recipe: Recipe, err: FlyteError | None, kept: str) -> FailureText:
    """Return the failure with the task's name, what is there to continue from (`kept`), and where the log is."""
    text = messages.taken_apart(err.message if err else "")
    further, failed = list(text.further), text.task
    execution = os.environ.get("FLYTE_INTERNAL_EXECUTION_ID", "")
    if not failed and (killed := _killed(recipe, execution)):
        # A process that is killed says no word: its last note does.
        failed = killed.task
        further.append(f"last seen: {killed}")
    if not failed and err and not is_local() and not err.failed_node_id.startswith("fn"):
        # On a cluster, what Flyte names is the node of this very task: fn0.
        failed = f"node {err.failed_node_id}"
    further.append(kept)
    if execution and not any(line.startswith("log: ") for line in further):
        page = os.environ.get("FLYTE_EXECUTION_URL", "").partition("/nodeId/")[0]
        further.append(f"log: the console's page of execution {execution} {page}".rstrip())
    sentence = f"{recipe.name}: {failed or 'the run'} failed: {text.sentence}"
    return FailureText(sentence, text.advice, further=tuple(further), details=text.details)


def _killed(recipe: Recipe, execution: str) -> PhaseNote | None:
    """Return the last note of a pod that was killed, of those of this execution."""
    if not execution:
        return None
    found = [
        note for place in [*find.addresses(recipe), *attempts_of(execution)] for note in phase_notes.read(place, execution)
    ]
    return max((note for note in found if note.was_killed), key=lambda note: note.attempt, default=None)
