"""Flyte's directories as folders on this machine's disk."""

import tempfile
from pathlib import Path

from flytekit import FlyteContextManager, current_context
from flytekit.types.directory import FlyteDirectory

from flytune.errors import DataError
from flytune.recipe import Recipe


def fetch(directory: FlyteDirectory) -> Path:
    """A directory's local folder, downloaded once however many workers of the node ask for it at the same time.

    Raises:
        DataError: it was there once and is no more (a cached local result whose temporary folder was cleared).
    """
    from filelock import FileLock

    folder = Path(directory.path)
    lock, done = (folder.with_name(folder.name + suffix) for suffix in (".lock", ".fetched"))
    if directory.remote_source is not None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if not done.exists():
                directory.download()
                done.touch()
    if not any(folder.glob("*")):
        raise DataError(
            f"{folder.name}: the stored folder is empty or gone; if it is a cached local result, clear the cache with "
            "`pyflyte local-cache clear` and run again"
        )
    return folder


def lasting(name: str) -> str | None:
    """An address that all attempts and executions see; None on this machine.

    Below the cluster's raw output location, beside what Flyte gives each attempt: LOCATION/SHARD/EXECUTION-NODE-ATTEMPT.
    """
    prefix = FlyteContextManager.current_context().file_access.raw_output_prefix
    scheme, _, path = prefix.partition("://")
    if not path or scheme == "file":
        return None
    location = "/".join(path.rstrip("/").split("/")[:-2]) or path.partition("/")[0]
    return f"{scheme}://{location}/flytune-{name}"


def placed(recipe: Recipe) -> Recipe:
    """The recipe with a folder for checkpoints that all attempts and executions see, where it names none."""
    if recipe.checkpoints.folder is not None or (folder := lasting("checkpoints")) is None:
        return recipe
    return recipe.model_copy(update={"checkpoints": recipe.checkpoints.model_copy(update={"folder": folder})})


def fresh(name: str) -> Path:
    """A path for a new folder of this attempt; the folder does not exist yet."""
    return Path(tempfile.mkdtemp(prefix="flytune-", dir=current_context().working_directory)) / name
