"""Publishing of artifacts to a folder, any fsspec address, or the Hugging Face Hub."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flytune.artifacts.publish import folder, hub, hub_errors
from flytune.errors import ExportError
from flytune.recipe import Recipe
from flytune.records.contents import CONTENTS, read_contents, verify
from flytune.storage import Storage

__all__ = ["attempt", "check", "publish", "published_name", "publishes"]

log = logging.getLogger(__name__)


def published_name(artifact: Path, recipe: Recipe) -> str:
    """Return the recipe's name and 12 hex digits of the artifact's identity, so that equal runs have equal
    names.

    Artifacts of version 0.1.0 have no identity; theirs is the hash of artifact.json.
    """
    content = (artifact / CONTENTS).read_bytes()
    digest = read_contents(content, artifact / CONTENTS).identity or hashlib.sha256(content).hexdigest()
    return f"{recipe.name}-{digest[:12]}"


def check(recipe: Recipe) -> None:
    """Check before training that the artifact can be published.

    Raises:
        ExportError: the hub does not know the token, or there is none; or the address cannot be written.
    """
    if str(recipe.publish.address).startswith(hub_errors.SCHEME):
        hub_errors.check(str(recipe.publish.address))
    elif recipe.publish.address:
        folder.check(recipe.publish.address)


def publishes(recipe: Recipe, broken: Sequence[str]) -> bool:
    """Return whether an artifact is published at once: it has an address, broke no guard, and waits for no
    approval."""
    return bool(recipe.publish.address) and not broken and recipe.publish.approval is None


def attempt(
    artifact: Path,
    recipe: Recipe,
    broken: Sequence[str],
    stored: Callable[[], str],
    weights: Storage | None = None,
) -> str:
    """Publish an artifact that Flyte has stored to its recipe's address.

    One that broke a guard is not published, which is logged; neither is one that a person has to approve
    first.

    Args:
        artifact: its folder.
        broken: a sentence for each failed guard.
        stored: called where it could not be published; returns the address at which the artifact stays all
            the same.
        weights: as in `publish`.

    Returns: its address; empty if nothing is published.

    Raises:
        ExportError: it could not be published; names that address, so that the artifact is not lost.
    """
    if not publishes(recipe, broken):
        if recipe.publish.address and broken:
            log.error("%s: stored, but not published: %s", recipe.name, "; ".join(broken))
        return ""
    try:
        return publish(artifact, str(recipe.publish.address), published_name(artifact, recipe), weights)
    except ExportError as error:
        again = ", which trains no step again" if recipe.checkpoints.save_steps else ""
        raise ExportError(
            f"{recipe.name}: not published: {error}. The artifact itself is stored, at {stored()}: copy it "
            f"from there, or run the recipe again{again}"
        ) from error


def publish(
    artifact: Path,
    address: str,
    name: str,
    weights: Storage | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> str:
    """Publish a complete artifact under `name` and return its address. Nothing that exists there is lost.

    `weights` is a storage with all files of the artifact, if the folder `artifact` lacks the weights.
    `beside` are further small files, which the artifact does not list.

    Below a folder or fsspec address it becomes the folder `address`/`name`. In a repository on the hub
    (hf://owner/name) `name` is a revision, and main is the newest publication. The files are the artifact's
    in both; on the hub the card names the repository.

    An equal artifact, or files of one that are there already, are left as they are.

    Raises:
        ExportError: a file of the artifact was changed; other files are there, or the address cannot be
            written to.
    """
    contents = verify(artifact, elsewhere=weights is not None)
    where = hub if address.startswith(hub_errors.SCHEME) else folder
    return where.publish(artifact, contents, address, name, weights, beside or {})
