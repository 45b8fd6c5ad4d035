"""Flyte's directories as local folders, and addresses that several attempts share."""

import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from flytekit import FlyteContextManager, current_context
from flytekit.exceptions.user import FlyteDataNotFoundException
from flytekit.types.directory import FlyteDirectory

from flytune import caches
from flytune.errors import DataError
from flytune.hardware import load_cluster
from flytune.models import BaseRequest, shared_cache
from flytune.recipe import Recipe
from flytune.storage import Storage
from flytune.training import attempt_notes

BASE_REQUEST = "base.json"
"""File with the request of a base model whose files fetch_base_model has not copied."""


def fetch(directory: FlyteDirectory) -> Path:
    """Return a directory's local folder, downloaded once even if many workers of the node request it at the same time.

    Raises:
        DataError: the folder is empty or gone (a cached local result whose temporary folder was cleared).
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


def fetch_without(weights: re.Pattern[str], directory: FlyteDirectory) -> tuple[Path, Storage | None]:
    """Return a directory's local folder without the files whose names match `weights`, and the storage of all its files.

    A folder of this machine has everything, and there is no such storage.

    Raises:
        DataError: the folder is empty or gone.
    """
    if directory.remote_source is None:
        return fetch(directory), None
    stored, folder = Storage(directory.remote_source, ""), new_folder() / "trained"
    folder.mkdir()
    names = [name for name in stored.sizes("") if not weights.fullmatch(name)]
    if not names:
        raise DataError(f"{directory.remote_source}: the stored folder is empty or gone; run again with --overwrite-cache")
    for name in names:
        stored.download(name, folder / name)
    return folder, stored


def is_local() -> bool:
    """Return True if tasks' outputs stay on this machine: a run without a cluster."""
    scheme, _, path = FlyteContextManager.current_context().file_access.raw_output_prefix.partition("://")
    return not path or scheme == "file"


def upload(folder: Path, others: Mapping[str, str] | None = None, source: Storage | None = None) -> FlyteDirectory:
    """Store a folder's content now, so that its address is known before the task returns; return it as Flyte's directory.

    The storage copies `others` from `source`, by their names in the folder, before it gets the folder's own files. In a local
    run the folder itself is the result, and gets them.
    """
    files = FlyteContextManager.current_context().file_access
    address = str(folder) if is_local() else files.get_random_remote_directory()
    if source is not None and others:
        Storage(address, "").copy_from(source, others, "copying the weights")
    if is_local():
        return FlyteDirectory(address)
    return FlyteDirectory(files.put_data(str(folder), address, is_multipart=True))


def fetch_file(directory: FlyteDirectory, name: str) -> Path:
    """Return the local path of one file of a directory, downloaded without the others."""
    if directory.remote_source is None:
        return Path(directory.path) / name
    target = new_folder() / name
    target.parent.mkdir(parents=True, exist_ok=True)
    FlyteContextManager.current_context().file_access.get_data(f"{directory.remote_source.rstrip('/')}/{name}", str(target))
    return target


def unpack_base_model(base: FlyteDirectory | None) -> None:
    """Bring the files of fetch_base_model into this node's Hugging Face cache, once even if many workers request them.

    They are downloaded, or linked where they are in cluster.yaml's model_cache.

    Raises:
        DataError: the stored files are gone.
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
            if not _link_from_model_cache(base, cache):
                FlyteContextManager.current_context().file_access.get_data(base.remote_source, str(cache), is_multipart=True)
        except FlyteDataNotFoundException:
            raise DataError(
                f"{base.remote_source}: the stored base model is gone; run again with --overwrite-cache, which fetches it again"
            ) from None
        done.touch()


def _link_from_model_cache(base: FlyteDirectory, cache: Path) -> bool:
    """Link a model that is in cluster.yaml's model_cache; return False if fetch_base_model has copied its files."""
    if (folder := load_cluster().model_cache) is None:
        return False
    try:
        request = BaseRequest.read(fetch_file(base, BASE_REQUEST))
    except FlyteDataNotFoundException:
        return False
    if request.commit is None:
        return False
    shared_cache.link(request, Path(folder), cache)
    return True


def shared_address(name: str) -> str | None:
    """Return an address that all attempts and executions share; None on this machine.

    It is below the cluster's raw output location, next to the folders of attempts: LOCATION/SHARD/EXECUTION-NODE-ATTEMPT.
    """
    scheme, _, path = FlyteContextManager.current_context().file_access.raw_output_prefix.partition("://")
    if is_local():
        return None
    location = "/".join(path.rstrip("/").split("/")[:-2]) or path.partition("/")[0]
    return f"{scheme}://{location}/flytune-{name}"


def attempt_notes_address() -> str | None:
    """Return the address of the phase notes that all attempts of this task share; None on this machine."""
    root = shared_address("phases")
    if root is None:
        return None
    # All attempts of a node have the same address of inputs; elements of a map task have an index as well.
    inputs = dict(zip(sys.argv, sys.argv[1:], strict=False)).get("--inputs", "")
    index = os.environ.get(os.environ.get("BATCH_JOB_ARRAY_INDEX_VAR_NAME", ""), "")
    key = hashlib.sha256(f"{inputs} {index}".encode()).hexdigest()[:16]
    return f"{root}/{os.environ.get('FLYTE_INTERNAL_EXECUTION_ID', 'none')}/{key}"


def attempt_notes_addresses(execution: str) -> list[str]:
    """Return the addresses of the phase notes of all tasks of an execution."""
    root = shared_address("phases")
    return [f"{root}/{execution}/{key}" for key in attempt_notes.names(f"{root}/{execution}")] if root else []


def with_checkpoint_folder(recipe: Recipe) -> Recipe:
    """Return the recipe with a checkpoint folder that all attempts and executions share, if it names none."""
    if recipe.checkpoints.folder is not None or (folder := shared_address("checkpoints")) is None:
        return recipe
    return recipe.model_copy(update={"checkpoints": recipe.checkpoints.model_copy(update={"folder": folder})})


def new_folder() -> Path:
    """Create an empty folder in this attempt's working directory."""
    return Path(tempfile.mkdtemp(prefix="flytune-", dir=current_context().working_directory))
