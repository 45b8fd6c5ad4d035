"""A run on fresh data: whether there is any, what it goes on from, and what becomes of its model."""

import logging
import re
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from flytune import data
from flytune.artifacts import build
from flytune.data import windows
from flytune.errors import AcceptedError, RecipeError
from flytune.evaluation import guards
from flytune.models import base
from flytune.recipe.recipe import Recipe
from flytune.records.metrics import Metrics
from flytune.registry import history
from flytune.registry.history import Decision, Duel

log = logging.getLogger(__name__)


class Turn(NamedTuple):
    """What is to be done at one kickoff."""

    trains: bool
    recipe: Recipe
    """To train: on the window's data, going on from the accepted model."""
    champion: str
    """The artifact that is accepted; empty where none is."""
    fingerprint: str
    """Of the window's data; empty where there is none."""
    reason: str


def decide(recipe: Recipe, kickoff: datetime, address: str, days: int) -> Turn:
    """Whether the data of the `days` before the kickoff is worth a run; `address` keeps the accepted models.

    Nothing is trained where the window is empty, or the newest decision was on the same recipe and data, whatever it was.

    Raises:
        RecipeError: the recipe names no data.heldout_path; or another base than the accepted adapter's.
        DataError, AcceptedError: an address cannot be read.
    """
    check(recipe)
    window = windows.render(recipe, kickoff, days)
    decisions = history.history(address)
    standing = history.current(decisions)
    if standing and standing.method != "full" and standing.base not in ("", _base(recipe)):
        raise RecipeError(
            f"recipe {recipe.name}: model: {_base(recipe)}, but the accepted adapter ({standing.artifact}) was trained on "
            f"{standing.base}, which pods that compare would not have; keep accepted models of different bases at different "
            "addresses"
        )
    champion = standing.artifact if standing else ""
    without = f"; nothing at {', '.join(window.missing)}" if window.missing else ""
    if window.recipe is None:
        return Turn(False, recipe, champion, "", f"no data in the window{without}")
    fingerprint = data.fingerprint(window.recipe.data)
    tried = next((one for one in reversed(decisions) if one.outcome != "rolled back"), None)
    if tried and (tried.fingerprint, tried.recipe) == (fingerprint, identity(recipe)):
        return Turn(
            False, recipe, champion, fingerprint, f"the data is that of decision {tried.number} ({tried.outcome}){without}"
        )
    going_on, how = _going_on(window.recipe, standing)
    return Turn(True, going_on, champion, fingerprint, f"fresh data; {how}{without}")


def check(recipe: Recipe) -> None:
    """Whether models of this recipe can be held against each other.

    Raises:
        RecipeError: it names no held-out data of its own, or adapters would be trained on a base that may move.
    """
    if not recipe.data.heldout_path:
        raise RecipeError(
            f"recipe {recipe.name}: data.heldout_path is missing: champion and challenger are held against each other on "
            "samples that never change; name a file or folder of them"
        )
    is_pinned = re.fullmatch(r"[0-9a-f]{40}", recipe.model.revision or "")
    if recipe.method.name != "full" and base.is_on_hub(recipe.model) and not is_pinned:
        raise RecipeError(
            f"recipe {recipe.name}: model.revision is no commit: an accepted adapter is right only on the commit that it was "
            "trained on, and a branch may move; write the commit's 40 digits"
        )


def identity(recipe: Recipe) -> str:
    """The recipe as a person wrote it, less what changes no model."""
    return f"{recipe.name}-{recipe.without_infrastructure().key()}"


def _going_on(recipe: Recipe, champion: Decision | None) -> tuple[Recipe, str]:
    if champion is None:
        return recipe, "no model is accepted yet: from the base model"
    if champion.base not in ("", _base(recipe)):
        return recipe, f"{champion.artifact} was trained from {champion.base}: from the base model"
    if champion.method != recipe.method.name:
        return recipe, f"{champion.artifact} is of method {champion.method}: from the base model"
    if recipe.method.name == "full":
        model = recipe.model.model_copy(update={"name_or_path": champion.artifact, "revision": None})
        return recipe.model_copy(update={"model": model}), f"going on from {champion.artifact}"
    method = recipe.method.model_copy(update={"adapter": champion.artifact})
    return recipe.model_copy(update={"method": method}), f"going on from {champion.artifact}"


def _base(recipe: Recipe) -> str:
    return f"{recipe.model.name_or_path}@{recipe.model.revision or ''}".rstrip("@")


def settle(
    recipe: Recipe, address: str, champion: str, fingerprint: str, challenger: str, duel: Duel, broken: list[str]
) -> Decision:
    """Records what became of a challenger: accepted where it is better beyond doubt and broke no guard, else refused.

    Args:
        recipe: as a person wrote it, as `decide` had it.
        challenger: where its artifact stays.
        broken: what flytune.evaluation.guards says of it.

    Raises:
        AcceptedError: another model was accepted meanwhile, so that it was held against the wrong one; or the address cannot
            be written to.
    """
    decision = Decision(
        time=datetime.now(UTC),
        outcome="accepted" if duel.is_won and not broken else "refused",
        artifact=challenger,
        method=recipe.method.name,
        base=_base(recipe),
        recipe=identity(recipe),
        fingerprint=fingerprint,
        duel=duel,
        reason="; ".join([duel.words(), *broken]),
    )
    return history.record(address, decision, expected=champion or None)


def stays_at(found: str, recipe: Recipe, metrics: Metrics) -> str:
    """Where the artifact at the address `found` stays: below publish.address, where the recipe has it published, else there.

    A repository on the hub is no such place: pods with GPUs, which compare, see no hub. Nor is an address that publishing
    failed to reach: an accepted model must be where the history says.

    Raises:
        AcceptedError: it cannot be read.
    """
    import fsspec

    address = recipe.publish.address
    if not address or address.startswith("hf://") or guards.broken(recipe, metrics):
        return found
    with tempfile.TemporaryDirectory() as folder:
        filesystem, root = fsspec.core.url_to_fs(found.rstrip("/"))
        try:
            filesystem.get_file(f"{root}/{build.CONTENTS}", f"{folder}/{build.CONTENTS}")
        except Exception as error:
            raise AcceptedError(f"{found}: {build.CONTENTS} cannot be read: {type(error).__name__}: {error}") from error
        published = f"{address.rstrip('/')}/{build.published_name(Path(folder), recipe)}"
    try:
        filesystem, root = fsspec.core.url_to_fs(published)
        filesystem.invalidate_cache()
        return published if filesystem.exists(f"{root}/{build.CONTENTS}") else found
    except Exception as error:  # noqa: BLE001 (each file system has errors of its own; what refuses to be read was not published)
        log.warning("%s: cannot be read (%s), so the artifact stays at %s", published, type(error).__name__, found)
        return found
