"""Publishing: an artifact at an address that outlives the run, a folder, any fsspec address, or the Hugging Face Hub."""

import hashlib
import logging
from pathlib import Path

from flytune.artifacts.publish import folder, hub, hub_errors
from flytune.errors import ExportError
from flytune.evaluation import guards
from flytune.recipe.recipe import Recipe
from flytune.records.contents import CONTENTS, Contents, record
from flytune.records.metrics import Metrics

__all__ = ["attempt", "check", "publish", "published_name"]

log = logging.getLogger(__name__)


def published_name(artifact: Path, recipe: Recipe) -> str:
    """The recipe's name and 12 hex digits of the artifact's content: each run has its own, an equal artifact the same."""
    return f"{recipe.name}-{hashlib.sha256((artifact / CONTENTS).read_bytes()).hexdigest()[:12]}"


def check(recipe: Recipe) -> None:
    """Refuses what could not be published, before anything is trained.

    Raises:
        ExportError: the hub does not know the token, or there is none.
    """
    if str(recipe.publish.address).startswith(hub_errors.SCHEME):
        hub_errors.check(str(recipe.publish.address))


def attempt(artifact: Path, recipe: Recipe, metrics: Metrics) -> str:
    """Publishes an artifact that Flyte has stored where its recipe says, unless it broke a guard.

    Returns: its address; else what went wrong, which is logged too: the artifact must not be lost for it. Empty where nothing
        is to be published.
    """
    if not recipe.publish.address:
        return ""
    if found := guards.broken(recipe, metrics):
        log.error("%s: stored, but not published: %s", recipe.name, "; ".join(found))
        return ""
    try:
        return publish(artifact, recipe.publish.address, published_name(artifact, recipe))
    except ExportError as error:
        log.error("%s: stored, but not published: %s", recipe.name, error)
        return f"(stored by Flyte, but not published: {error})"


def publish(artifact: Path, address: str, name: str) -> str:
    """Publishes a whole artifact under `name`, and returns where it is now. Nothing is ever lost of what was there.

    Below a folder or fsspec address it is the folder `address`/`name`. In a repository on the hub (hf://owner/name) `name` is a
    revision, and main is what was published last. The files are the artifact's in both; on the hub the card names the
    repository.

    An equal artifact that is there already, or the equal part of one, is left as it is.

    Raises:
        ExportError: something else is there, or the address cannot be written to.
    """
    contents = record(Contents, artifact / CONTENTS)
    where = hub if address.startswith(hub_errors.SCHEME) else folder
    return where.publish(artifact, contents, address, name)
