"""Where the checkpoints of a run lie, and when they may go."""

from contextlib import suppress
from pathlib import Path

from flytune.recipe.recipe import Recipe
from flytune.records.dataset import Manifest
from flytune.records.training import TrainingResult
from flytune.storage import Storage
from flytune.training import attempt_notes, phase_notes
from flytune.training.checkpoints import staging
from flytune.training.checkpoints.ledger import Ledger


def run_key(recipe: Recipe, content_sha256: str) -> str:
    """Of what was decided, machines and who is told left out: a run goes on where another shape has left it."""
    return f"{recipe.name}-{recipe.without_infrastructure().key()}-{content_sha256[:8]}"


def home_of(recipe: Recipe, key: str) -> Path:
    """On a file system: where attempts write before they store. Its name is what trackers group a run by."""
    return Path(recipe.checkpoints.home).absolute() / (recipe.checkpoints.name or key)


def ledger_of(recipe: Recipe, key: str) -> Ledger:
    """All attempts' checkpoints."""
    settings, home = recipe.checkpoints, home_of(recipe, key)
    address = str(home) if settings.home == settings.address else f"{settings.address.rstrip('/')}/{home.name}"
    return Ledger(Storage(address), settings.save_total_limit)


def clear(recipe: Recipe, manifest: Manifest, training: TrainingResult) -> None:
    """What an attempt has trained is stored: its checkpoints, and those of earlier attempts, are no longer needed.

    Not before: a pod that is lost while its weights are uploaded goes on from them. A next run of the recipe is meant to train;
    of a run that a budget has stopped, it is meant to go on.
    """
    if not (recipe.checkpoints.save_steps and training.attempt) or training.stopped_early:
        return
    ledger = ledger_of(recipe, run_key(recipe, manifest.content_sha256))
    ledger.begin(training.attempt)
    ledger.clear()
    attempt_notes.clear(ledger.storage.address)
    phase_notes.clear(ledger.storage.address)
    if ledger.storage.is_local:
        # Attempts that were killed after the last one had swept.
        staging.sweep(Path(ledger.storage.address))
        with suppress(OSError):  # another attempt is at work
            Path(ledger.storage.address).rmdir()
