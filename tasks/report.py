"""What happened to a run that failed, in words, and what it can go on from."""

import html
import logging

from flytekit import Deck, Resources, task
from flytekit.types.error.error import FlyteError

from flytune import notifying
from flytune.checkpoints import finding
from flytune.recipe import Recipe
from images import LIGHT
from tasks.folders import is_local, placed
from tasks.interfaces import trimmed
from tasks.secrets import secrets

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
        where = f" in node {err.failed_node_id}" if err and err.failed_node_id and not is_local() else ""
        text = f"{recipe.name}: failed{where}.\n{err.message if err else ''}\n{finding.described(placed(recipe))}"
        log.error(text)
        Deck("Failure", f"<pre>{html.escape(text)}</pre>")
        notifying.tell(recipe, "failed", text)
    except Exception:  # it would hide the run's own error
        log.exception("%s: failed, and what there is to go on from could not be told", recipe.name)
