"""Checkpoint paths, and when checkpoints are deleted."""

from contextlib import suppress
from pathlib import Path

from flytune.objectives import objective_of
from flytune.recipe import Recipe
from flytune.records import Manifest, TrainingResult
from flytune.storage import Storage
from flytune.training import earlier_attempts
from flytune.training.checkpoints import staging
from flytune.training.checkpoints.ledger import Ledger


def run_key(recipe: Recipe, content_sha256: str) -> str:
    """Return the key of a run: of its decisions, without machines and trackers, so that a run resumes on
    another shape."""
    return f"{recipe.name}-{recipe.without_infrastructure().key()}-{content_sha256[:8]}"


def home_of(recipe: Recipe, key: str) -> Path:
    """Return the folder on this node that attempts write into before they store; trackers group runs by its
    name."""
    return Path(recipe.checkpoints.home).absolute() / (recipe.checkpoints.name or key)


def ledger_of(recipe: Recipe, key: str) -> Ledger:
    """Return the ledger of all attempts' checkpoints."""
    settings, home = recipe.checkpoints, home_of(recipe, key)
    address = (
        str(home) if settings.home == settings.address else f"{settings.address.rstrip('/')}/{home.name}"
    )
    return Ledger(Storage(address), settings.save_total_limit, keeps_best=settings.export == "best")


def clear(recipe: Recipe, manifest: Manifest, training: TrainingResult) -> None:
    """Delete the checkpoints of an attempt and of earlier ones, once its artifact is stored.

    Until then they are needed: an attempt that follows a pod lost in the upload resumes from them. The next
    run of the recipe is meant to train from the start, unless a budget stopped this one: then it is meant to
    resume, and they are kept.
    """
    if not training.attempt or training.stopped_early:
        return
    ledger = ledger_of(recipe, run_key(recipe, manifest.content_sha256))
    objective_of(recipe).clear(ledger.storage.address)
    if not recipe.checkpoints.save_steps:
        earlier_attempts.clear(ledger.storage.address)
        _remove_if_empty(ledger)
        return
    ledger.begin(training.attempt)
    ledger.clear()
    earlier_attempts.clear(ledger.storage.address)
    if ledger.storage.is_local:
        # Folders of attempts that were killed after the last sweep.
        staging.sweep(Path(ledger.storage.address))
    _remove_if_empty(ledger)


def _remove_if_empty(ledger: Ledger) -> None:
    if ledger.storage.is_local:
        with suppress(OSError):  # another attempt is at work
            Path(ledger.storage.address).rmdir()
