"""Checkpoints that a next run can resume from, found from outside of a run by names and sizes, without their
contents."""

from typing import NamedTuple

from flytune.errors import StorageError, TrainingError
from flytune.recipe import Recipe
from flytune.storage import Storage
from flytune.training.checkpoints import paths
from flytune.training.checkpoints.ledger import Checkpoint, Ledger


class Found(NamedTuple):
    """A checkpoint, and the address of its ledger."""

    checkpoint: Checkpoint
    address: str

    def __str__(self) -> str:
        return f"step {self.checkpoint.step}, {self.address}/{self.checkpoint.folder}"


def newest(recipe: Recipe, content_sha256: str = "") -> Found | None:
    """Return the newest complete checkpoint of a recipe, and of the data whose hash is given.

    Raises:
        StorageError: the storage is unavailable, or denies access.
    """
    candidates: list[Found] = []
    for ledger in _ledgers(recipe, content_sha256):
        complete = (
            checkpoint for checkpoint in ledger.checkpoints() if not ledger.fault(checkpoint, share=slice(0))
        )
        candidates += [Found(candidate, ledger.storage.address) for candidate in complete][:1]
    return max(candidates, key=lambda candidate: candidate.checkpoint.step, default=None)


def required(recipe: Recipe, content_sha256: str) -> Found:
    """Return the newest complete checkpoint of a recipe and its data.

    Raises:
        TrainingError: there is none; says whether there are some of another recipe or other data.
        StorageError: the storage is unavailable, or denies access.
    """
    if newest_one := newest(recipe, content_sha256):
        return newest_one
    parent, folders = _siblings(recipe)
    others = sorted(name for name in folders if name.startswith(f"{recipe.name}-"))
    raise TrainingError(
        f"recipe {recipe.name}: there is no complete checkpoint of this recipe and its data below {parent}, "
        "so there is nothing to resume from; "
        + (
            f"there are {', '.join(others[:4])}: of other decisions or other data; where these may differ, "
            "set checkpoints.name"
            if others
            else "run finetune, which starts at step 0 (checkpoints are deleted once an artifact is stored)"
        )
    )


def described(recipe: Recipe) -> str:
    """Return a sentence on what a next run resumes from. For messages: a storage error is described, not
    raised."""
    if not recipe.checkpoints.save_steps:
        return (
            "No checkpoints are written (checkpoints.save_steps is not set): the next run starts at step 0."
        )
    try:
        newest_one = newest(recipe)
    except StorageError as error:
        return f"It is unknown whether there is a checkpoint: {error}"
    return (
        f"Newest complete checkpoint: {newest_one}; the same recipe resumes from it."
        if newest_one
        else "There is no complete checkpoint."
    )


def addresses(recipe: Recipe) -> list[str]:
    """Return the addresses of the recipe's checkpoints of any data; none where the storage cannot be
    listed."""
    try:
        return [ledger.storage.address for ledger in _ledgers(recipe, "")]
    except StorageError:
        return []


def _ledgers(recipe: Recipe, content_sha256: str) -> list[Ledger]:
    if content_sha256 or recipe.checkpoints.name:
        return [paths.ledger_of(recipe, paths.run_key(recipe, content_sha256))]
    key = paths.run_key(recipe, "")
    return [paths.ledger_of(recipe, folder) for folder in _siblings(recipe)[1] if folder.startswith(key)]


def _siblings(recipe: Recipe) -> tuple[str, list[str]]:
    """Return the parent address of the ledgers, and the names of all."""
    parent = paths.ledger_of(recipe, "none").storage.address.rpartition("/")[0]
    return parent, Storage(parent).names()
