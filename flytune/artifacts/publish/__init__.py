"""Publishing of artifacts to a folder, any fsspec address, or the Hugging Face Hub."""

import hashlib
import logging
from pathlib import Path

from flytune.artifacts.publish import folder, hub, hub_errors
from flytune.errors import ExportError
from flytune.evaluation import guards
from flytune.recipe import Recipe
from flytune.records import Metrics
from flytune.records.contents import CONTENTS, verify
from flytune.storage import Storage

__all__ = ["attempt", "check", "checkpoints", "publish", "published_name"]

log = logging.getLogger(__name__)


def published_name(artifact: Path, recipe: Recipe) -> str:
    """Return the recipe's name and 12 hex digits of the artifact's content, so that equal artifacts have equal names."""
    return f"{recipe.name}-{hashlib.sha256((artifact / CONTENTS).read_bytes()).hexdigest()[:12]}"


def check(recipe: Recipe) -> None:
    """Check before training that the artifact can be published.

    Raises:
        ExportError: the hub does not know the token, or there is none.
    """
    if str(recipe.publish.address).startswith(hub_errors.SCHEME):
        hub_errors.check(str(recipe.publish.address))


def attempt(artifact: Path, recipe: Recipe, metrics: Metrics, weights: Storage | None = None) -> str:
    """Publish an artifact that Flyte has stored to its recipe's address, unless it broke a guard; `weights` as in `publish`.

    Returns: its address; on failure the reason, which is logged too, as a failure must not lose the artifact; empty if nothing
        is published.
    """
    if not recipe.publish.address:
        return ""
    if found := guards.broken(recipe, metrics):
        log.error("%s: stored, but not published: %s", recipe.name, "; ".join(found))
        return ""
    try:
        return publish(artifact, recipe.publish.address, published_name(artifact, recipe), weights)
    except ExportError as error:
        log.error("%s: stored, but not published: %s", recipe.name, error)
        return f"(stored by Flyte, but not published: {error})"


def publish(artifact: Path, address: str, name: str, weights: Storage | None = None) -> str:
    """Publish a complete artifact under `name` and return its address. Nothing that exists there is lost.

    `weights` is a storage with all files of the artifact, if the folder `artifact` lacks the weights.

    Below a folder or fsspec address it becomes the folder `address`/`name`. In a repository on the hub (hf://owner/name) `name`
    is a revision, and main is the newest publication. The files are the artifact's in both; on the hub the card names the
    repository.

    An equal artifact, or files of one that are there already, are left as they are.

    Raises:
        ExportError: a file of the artifact was changed; other files are there, or the address cannot be written to.
    """
    contents = verify(artifact, elsewhere=weights is not None)
    where = hub if address.startswith(hub_errors.SCHEME) else folder
    return where.publish(artifact, contents, address, name, weights)
