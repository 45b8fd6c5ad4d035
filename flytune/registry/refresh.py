"""Refresh: a run on new data, the model that it starts from, and the decision on its result."""

import logging
import re
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from flytune import data
from flytune.artifacts.publish import published_name
from flytune.data import windows
from flytune.errors import AcceptedError, RecipeError
from flytune.evaluation import guards
from flytune.models import base
from flytune.recipe import Recipe
from flytune.records import Metrics
from flytune.records.contents import CONTENTS
from flytune.registry import history
from flytune.registry.history import Decision, ModelComparison
from flytune.row_names import ANSWERS
from flytune.sentences import at_revision
from flytune.storage import Storage

log = logging.getLogger(__name__)
_FIRST_YEAR = 2020
"""Year before which there was no Flyte; a platform that knows no time says 1970."""


class RefreshDecision(NamedTuple):
    """Decision at one kickoff: train or skip."""

    trains: bool
    recipe: Recipe
    """Recipe to train: on the window's data, starting from the accepted model."""
    champion: str
    """Address of the accepted artifact; empty if no model is accepted."""
    fingerprint: str
    """Fingerprint of the window's data; empty if the window has none."""
    reason: str


def decide(recipe: Recipe, kickoff: datetime, address: str, days: int) -> RefreshDecision:
    """Decide if the data of the `days` before the kickoff is trained on; `address` holds the history of
    accepted models.

    A run is skipped if the window is empty, or if the newest decision, of any outcome, was on the same recipe
    and data.

    Raises:
        RecipeError: the recipe has no data.heldout_path, or another base model than the accepted adapter.
        DataError, AcceptedError: an address cannot be read.
    """
    check(recipe)
    if kickoff.year < _FIRST_YEAR:
        raise RecipeError(
            f"recipe {recipe.name}: kickoff: {kickoff:%Y-%m-%d}: the platform has not said when the run "
            "began; nothing was trained or skipped: run it with --kickoff"
        )
    window = windows.render(recipe, kickoff, days)
    decisions = history.decisions_at(address)
    accepted = history.current(decisions)
    if accepted and accepted.method != "full" and accepted.base not in ("", _base(recipe)):
        raise RecipeError(
            f"recipe {recipe.name}: model: {_base(recipe)}, but the accepted adapter ({accepted.artifact}) "
            f"was trained on {accepted.base}, which the pods that compare models would not have; keep "
            "accepted models of different bases at different addresses"
        )
    champion = accepted.artifact if accepted else ""
    missing = f"; nothing at {', '.join(window.missing)}" if window.missing else ""
    if window.recipe is None:
        return RefreshDecision(False, recipe, champion, "", f"no data in the window{missing}")
    fingerprint = data.fingerprint(window.recipe.data)
    newest = next((decision for decision in reversed(decisions) if decision.outcome != "rolled back"), None)
    if newest and (newest.fingerprint, newest.recipe) == (fingerprint, identity(recipe)):
        reason = f"the data is that of decision {newest.number} ({newest.outcome}){missing}"
        return RefreshDecision(False, recipe, champion, fingerprint, reason)
    changed, start = _with_start(window.recipe, accepted)
    if recipe.publish.approval is not None:
        # Its copy is published by the answer that accepts it.
        changed = changed.model_copy(update={"publish": changed.publish.model_copy(update={"address": None})})
    return RefreshDecision(True, changed, champion, fingerprint, f"new data; {start}{missing}")


def check(recipe: Recipe) -> None:
    """Check that models of this recipe can be compared with each other.

    Raises:
        RecipeError: it has no held-out data of its own, or adapters would be trained on a base model that may
            change.
    """
    if recipe.row_kind != ANSWERS:
        where = "data.images" if recipe.data.images else f"objective: {recipe.objective.name}"
        raise RecipeError(
            f"recipe {recipe.name}: {where}: champion and challenger are compared by the loss of their "
            "answers to texts; run workflows.finetune instead"
        )
    if not recipe.data.heldout_path:
        raise RecipeError(
            f"recipe {recipe.name}: data.heldout_path is missing: champion and challenger are compared on "
            "samples that never change; name a file or folder of them"
        )
    is_pinned = re.fullmatch(r"[0-9a-f]{40}", recipe.model.revision or "")
    if recipe.method.name != "full" and base.is_on_hub(recipe.model) and not is_pinned:
        raise RecipeError(
            f"recipe {recipe.name}: model.revision is not a commit: an accepted adapter is right only on the "
            "commit that it was trained on, and a branch may move; write the commit's 40 digits"
        )


def identity(recipe: Recipe) -> str:
    """Return the name and key of a recipe as a person wrote it, without the settings that change no model."""
    return f"{recipe.name}-{recipe.without_infrastructure().key()}"


def _with_start(recipe: Recipe, champion: Decision | None) -> tuple[Recipe, str]:
    """Return the recipe that starts from the accepted model if it can, and its starting point in words."""
    if champion is None:
        return recipe, "no model is accepted yet: starts from the base model"
    if champion.base not in ("", _base(recipe)):
        return recipe, f"{champion.artifact} was trained from {champion.base}: starts from the base model"
    if champion.method != recipe.method.name:
        return recipe, f"{champion.artifact} is of method {champion.method}: starts from the base model"
    if recipe.method.name == "full":
        model = recipe.model.model_copy(update={"name_or_path": champion.artifact, "revision": None})
        return recipe.model_copy(update={"model": model}), f"starts from {champion.artifact}"
    method = recipe.method.model_copy(update={"adapter": champion.artifact})
    return recipe.model_copy(update={"method": method}), f"starts from {champion.artifact}"


def _base(recipe: Recipe) -> str:
    return at_revision(recipe.model.name_or_path, recipe.model.revision)


def decision_on(
    recipe: Recipe,
    fingerprint: str,
    challenger: str,
    comparison: ModelComparison,
    broken: list[str],
    doubts: Sequence[str] = (),
) -> Decision:
    """Return the decision on a challenger: accepted if it is significantly better and broke no guard, else
    refused.

    Args:
        recipe: the recipe as a person wrote it, as `decide` got it.
        fingerprint: fingerprint of the challenger's training data.
        challenger: final address of the challenger's artifact.
        comparison: losses of both models.
        broken: the guards that the challenger broke, by flytune.evaluation.guards.
        doubts: what makes the figures doubtful (Metrics.doubts).
    """
    return Decision(
        time=datetime.now(UTC),
        outcome="accepted" if comparison.is_won and not broken else "refused",
        artifact=challenger,
        method=recipe.method.name,
        base=_base(recipe),
        recipe=identity(recipe),
        fingerprint=fingerprint,
        duel=comparison,
        reason="; ".join([comparison.describe(), *broken, *(f"in doubt: {doubt}" for doubt in doubts)]),
    )


def final_address(address: str, recipe: Recipe, metrics: Metrics) -> str:
    """Return the lasting address of the artifact at `address`: its published copy below publish.address, else
    `address`.

    A repository on the hub does not count: pods with GPUs, which compare models, have no access to the hub.
    Neither does an address that publishing failed to reach: an accepted model must be at the address in the
    history.

    Raises:
        AcceptedError: the artifact cannot be read.
    """
    target = recipe.publish.address
    if not target or target.startswith("hf://") or guards.broken(recipe, metrics):
        return address
    try:
        content = Storage(address, key="", error=AcceptedError, retry=False).read(CONTENTS)
    except FileNotFoundError:
        raise AcceptedError(
            f"{address}: {CONTENTS} cannot be read: it does not exist; run the training again"
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CONTENTS).write_bytes(content)
        published = f"{target.rstrip('/')}/{published_name(Path(folder), recipe)}"
    try:
        is_published = Storage(published, key="", error=AcceptedError, retry=False).exists(CONTENTS)
    except AcceptedError as error:
        log.warning("%s; the artifact's address stays %s", error, address)
        return address
    return published if is_published else address
