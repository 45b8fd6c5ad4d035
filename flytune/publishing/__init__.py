"""Publishing: an artifact at an address that outlives the run, a folder, any fsspec address, or the Hugging Face Hub."""

import hashlib
import logging
from pathlib import Path

from flytune import guards
from flytune.metrics import Metrics
from flytune.publishing import hub, hub_errors, storage
from flytune.publishing.contents import CONTENTS, Contents, record
from flytune.recipe import Recipe

__all__ = ["publish", "publish_good", "published_name"]

log = logging.getLogger(__name__)


def published_name(artifact: Path, recipe: Recipe) -> str:
    """The recipe's name and 12 hex digits of the artifact's content: each run has its own, an equal artifact the same."""
    return f"{recipe.name}-{hashlib.sha256((artifact / CONTENTS).read_bytes()).hexdigest()[:12]}"


def publish_good(artifact: Path, recipe: Recipe, metrics: Metrics) -> str:
    """Publishes an artifact where its recipe says, unless it broke a guard; returns its address, or an empty string.

    Raises:
        ExportError: as publish.
    """
    if not recipe.publish.address:
        return ""
    if found := guards.broken(recipe, metrics):
        log.error("%s: stored, but not published: %s", recipe.name, "; ".join(found))
        return ""
    return publish(artifact, recipe.publish.address, published_name(artifact, recipe))


def publish(artifact: Path, address: str, name: str) -> str:
    """Publishes a whole artifact under `name`, and returns where it is now. Nothing is ever lost of what was there.

    Below a folder or fsspec address it is the folder `address`/`name`, file by file as in the artifact. In a repository on
    the hub (hf://owner/name) `name` is a revision, and main is what was published last; what lies in model/ or adapter/ stands
    at its root there, where from_pretrained and servers look.

    An equal artifact that is there already, or the equal part of one, is left as it is.

    Raises:
        ExportError: something else is there, or the address cannot be written to.
    """
    contents = record(Contents, artifact / CONTENTS)
    where = hub if address.startswith(hub_errors.SCHEME) else storage
    return where.publish(artifact, contents, address, name)
