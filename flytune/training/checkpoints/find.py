"""What there is to go on from, looked at from outside of a run: by names and sizes, without reading what checkpoints hold."""

from typing import NamedTuple

from flytune.errors import StorageError, TrainingError
from flytune.recipe.recipe import Recipe
from flytune.storage import Storage
from flytune.training.checkpoints import paths
from flytune.training.checkpoints.ledger import Checkpoint, Ledger


class Found(NamedTuple):
    """A checkpoint, and where its ledger is."""

    checkpoint: Checkpoint
    address: str

    def __str__(self) -> str:
        return f"step {self.checkpoint.step}, {self.address}/{self.checkpoint.folder}"


def newest(recipe: Recipe, content_sha256: str = "") -> Found | None:
    """The newest whole checkpoint of a recipe, and of that data where its hash is given.

    Raises:
        StorageError: the storage is away, or refuses.
    """
    found: list[Found] = []
    for ledger in _ledgers(recipe, content_sha256):
        whole = (one for one in ledger.checkpoints() if not ledger.fault(one, share=slice(0)))
        found += [Found(one, ledger.storage.address) for one in whole][:1]
    return max(found, key=lambda one: one.checkpoint.step, default=None)


def required(recipe: Recipe, content_sha256: str) -> Found:
    """The same, where there must be one.

    Raises:
        TrainingError: there is none; says whether there are some of another recipe or other data.
        StorageError: the storage is away, or refuses.
    """
    if found := newest(recipe, content_sha256):
        return found
    place, folders = _beside(recipe)
    others = sorted(name for name in folders if name.startswith(f"{recipe.name}-"))
    raise TrainingError(
        f"recipe {recipe.name}: there is no whole checkpoint of this recipe and its data below {place}, so there is nothing to "
        "go on from; "
        + (
            f"there are {', '.join(others[:4])}: of other decisions or other data; where these may differ, set checkpoints.name"
            if others
            else "run finetune, which starts at step 0 (checkpoints are removed once an artifact is stored)"
        )
    )


def described(recipe: Recipe) -> str:
    """One sentence on what a next run goes on from; for messages, so that what goes wrong is said and not raised."""
    if not recipe.checkpoints.save_steps:
        return "No checkpoints are written (checkpoints.save_steps is not set): the next run starts at step 0."
    try:
        found = newest(recipe)
    except StorageError as error:
        return f"Whether there is a checkpoint cannot be told: {error}"
    return f"Newest whole checkpoint: {found}; the same recipe goes on from it." if found else "There is no whole checkpoint."


def addresses(recipe: Recipe) -> list[str]:
    """Return addresses of the recipe's checkpoints, of whatever data; none where they cannot be found out."""
    try:
        return [ledger.storage.address for ledger in _ledgers(recipe, "")]
    except StorageError:
        return []


def _ledgers(recipe: Recipe, content_sha256: str) -> list[Ledger]:
    if content_sha256 or recipe.checkpoints.name:
        return [paths.ledger_of(recipe, paths.run_key(recipe, content_sha256))]
    key = paths.run_key(recipe, "")
    return [paths.ledger_of(recipe, folder) for folder in _beside(recipe)[1] if folder.startswith(key)]


def _beside(recipe: Recipe) -> tuple[str, list[str]]:
    """Where ledgers lie, and the names of all."""
    place = paths.ledger_of(recipe, "none").storage.address.rpartition("/")[0]
    return place, Storage(place).names()
