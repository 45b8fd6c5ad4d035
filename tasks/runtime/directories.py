"""Flyte's directories as folders on this machine's disk."""

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from flytekit import FlyteContextManager, current_context
from flytekit.exceptions.user import FlyteDataNotFoundException
from flytekit.types.directory import FlyteDirectory

from flytune import caches
from flytune.errors import DataError
from flytune.recipe.recipe import Recipe
from flytune.training import attempt_notes


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


def is_local() -> bool:
    """Whether what tasks hand on stays on this machine: a run without a cluster."""
    scheme, _, path = FlyteContextManager.current_context().file_access.raw_output_prefix.partition("://")
    return not path or scheme == "file"


def uploaded(folder: Path) -> FlyteDirectory:
    """A folder's content as Flyte's directory, stored now: its address is known before the task returns."""
    files = FlyteContextManager.current_context().file_access
    if is_local():
        return FlyteDirectory(str(folder))
    return FlyteDirectory(files.put_data(str(folder), files.get_random_remote_directory(), is_multipart=True))


def fetch_file(directory: FlyteDirectory, name: str) -> Path:
    """One file of a directory, without the others."""
    if directory.remote_source is None:
        return Path(directory.path) / name
    target = fresh("file") / name
    target.parent.mkdir(parents=True, exist_ok=True)
    FlyteContextManager.current_context().file_access.get_data(f"{directory.remote_source.rstrip('/')}/{name}", str(target))
    return target


def unpack(base: FlyteDirectory | None) -> None:
    """Puts what fetch_base_model stored into this node's Hugging Face cache, once however many workers ask.

    Raises:
        DataError: it was stored once and is no more.
    """
    if base is None or base.remote_source is None:
        return
    from filelock import FileLock

    cache = caches.hub_folder("")
    done = cache / f".unpacked-{hashlib.sha256(base.remote_source.encode()).hexdigest()[:16]}"
    with FileLock(done.with_suffix(".lock")):
        if done.exists():
            return
        try:
            FlyteContextManager.current_context().file_access.get_data(base.remote_source, str(cache), is_multipart=True)
        except FlyteDataNotFoundException:
            raise DataError(
                f"{base.remote_source}: the stored base model is gone; run again with --overwrite-cache, which fetches it anew"
            ) from None
        done.touch()


def lasting(name: str) -> str | None:
    """An address that all attempts and executions see; None on this machine.

    Below the cluster's raw output location, beside what Flyte gives each attempt: LOCATION/SHARD/EXECUTION-NODE-ATTEMPT.
    """
    scheme, _, path = FlyteContextManager.current_context().file_access.raw_output_prefix.partition("://")
    if is_local():
        return None
    location = "/".join(path.rstrip("/").split("/")[:-2]) or path.partition("/")[0]
    return f"{scheme}://{location}/flytune-{name}"


def attempts_place() -> str | None:
    """Return an address that the attempts of this very task have in common; None on this machine."""
    root = lasting("phases")
    if root is None:
        return None
    # Of a node, all attempts have the same inputs' address; parts of a map task have an index as well.
    inputs = dict(zip(sys.argv, sys.argv[1:], strict=False)).get("--inputs", "")
    index = os.environ.get(os.environ.get("BATCH_JOB_ARRAY_INDEX_VAR_NAME", ""), "")
    key = hashlib.sha256(f"{inputs} {index}".encode()).hexdigest()[:16]
    return f"{root}/{os.environ.get('FLYTE_INTERNAL_EXECUTION_ID', 'none')}/{key}"


def attempts_of(execution: str) -> list[str]:
    """Return those addresses of all tasks of an execution."""
    root = lasting("phases")
    return [f"{root}/{execution}/{key}" for key in attempt_notes.names(f"{root}/{execution}")] if root else []


def placed(recipe: Recipe) -> Recipe:
    """The recipe with a folder for checkpoints that all attempts and executions see, where it names none."""
    if recipe.checkpoints.folder is not None or (folder := lasting("checkpoints")) is None:
        return recipe
    return recipe.model_copy(update={"checkpoints": recipe.checkpoints.model_copy(update={"folder": folder})})


def fresh(name: str) -> Path:
    """A path for a new folder of this attempt; the folder does not exist yet."""
    return Path(tempfile.mkdtemp(prefix="flytune-", dir=current_context().working_directory)) / name
