"""Stored folders as local ones, and the addresses that attempts and executions share."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from flytune.errors import DataError
from flytune.recipe import Recipe
from flytune.stages.orchestrator import Folder, Orchestrator, Stored
from flytune.storage import Storage
from flytune.training.checkpoints import find


def local(orchestrator: Orchestrator, stored: Stored) -> Path:
    """Return a file's or folder's local path, fetched once even if many workers of the node request it at the
    same time.

    Raises:
        DataError: the folder is empty or gone (a cached local result whose temporary folder was cleared).
    """
    path = stored.path
    if not stored.is_here:
        is_fetched = path.with_name(f"{path.name}.fetched")
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f"{path.name}.lock")):
            if not is_fetched.exists():
                orchestrator.fetch(stored.address, path, isinstance(stored, Folder))
                is_fetched.touch()
    if isinstance(stored, Folder) and not any(path.glob("*")):
        raise DataError(
            f"{path.name}: the stored folder is empty or gone; if it is a cached local result, clear the "
            "cache with `pyflyte local-cache clear` and run again"
        )
    return path


def at_address(orchestrator: Orchestrator, address: str) -> Folder:
    """Return the folder at an address."""
    if "://" in address:
        return Folder(address, orchestrator.new_folder() / "fetched")
    return Folder.here(Path(address))


def local_file(orchestrator: Orchestrator, folder: Folder, name: str) -> Path:
    """Return the local path of one file of a folder, fetched without the others.

    Raises:
        FileNotFoundError: there is none at an address.
    """
    if folder.is_here:
        return folder.path / name
    target = orchestrator.new_folder() / name
    target.parent.mkdir(parents=True, exist_ok=True)
    orchestrator.fetch(f"{folder.address.rstrip('/')}/{name}", target)
    return target


def local_without(
    orchestrator: Orchestrator, weights: re.Pattern[str], folder: Folder
) -> tuple[Path, Storage | None]:
    """Return a folder's local path without the files whose names match `weights`, and the storage of all its
    files.

    A folder of this machine has everything, and there is no such storage.

    Raises:
        DataError: the folder is empty or gone.
    """
    if folder.is_here:
        return local(orchestrator, folder), None
    stored = Storage(folder.address, "")
    folder_here = orchestrator.new_folder() / "trained"
    folder_here.mkdir()
    names = [name for name in stored.sizes("") if not weights.fullmatch(name)]
    if not names:
        raise DataError(
            f"{folder.address}: the stored folder is empty or gone; run again with --overwrite-cache"
        )
    for name in names:
        stored.download(name, folder_here / name)
    return folder_here, stored


def store(
    orchestrator: Orchestrator,
    folder: Path,
    others: Mapping[str, str] | None = None,
    source: Storage | None = None,
) -> Folder:
    """Store a folder's content now, so that its address is known before the stage returns.

    The storage copies `others` from `source`, by their names in the folder, before it gets the folder's own
    files. In a local run the folder itself is the result, and gets them.
    """
    address = str(folder) if orchestrator.is_local() else orchestrator.new_address()
    if source is not None and others:
        Storage(address, "").copy_from(source, others, "copying the weights")
    if not orchestrator.is_local():
        address = orchestrator.store(folder, address)
    return Folder(address, folder)


def with_checkpoint_folder(orchestrator: Orchestrator, recipe: Recipe) -> Recipe:
    """Return the recipe with a checkpoint folder that all attempts and executions share, if it names none.

    Each stage that needs it asks: the plan does not hand it on, so that no artifact names the cluster's
    storage, and a stage that runs alone, after a failure or on Ctrl-C finds the same folder.
    """
    if recipe.checkpoints.folder is not None:
        return recipe
    folder = orchestrator.shared_address("checkpoints")
    if folder is None:
        return recipe
    return recipe.model_copy(update={"checkpoints": recipe.checkpoints.model_copy(update={"folder": folder})})


def show_saved(orchestrator: Orchestrator, recipe: Recipe, signal_name: str) -> None:
    """Print what is saved of a run that a signal ends here."""
    # A print may be what the signal has interrupted, and its stream cannot be entered again.
    os.write(2, f"\n{recipe.name}: {signal_name}: {saved_sentence(orchestrator, recipe)}\n".encode())


def saved_sentence(orchestrator: Orchestrator, recipe: Recipe) -> str:
    """Return what is saved of a run that a Ctrl-C ends here, and what the same command does next."""
    if not recipe.checkpoints.save_steps:
        return (
            "no checkpoints are written (checkpoints.save_steps is not set); the same command starts "
            "again at step 0"
        )
    try:
        newest = find.newest(with_checkpoint_folder(orchestrator, recipe))
    except Exception as error:  # noqa: BLE001 (each file system has errors of its own, and the process ends anyway)
        return f"the same command resumes from the newest checkpoint, which cannot be read now: {error}"
    if newest is None:
        return "no step is saved yet; the same command starts again at step 0"
    return f"step {newest.checkpoint.step} is saved; the same command resumes from it ({newest.address})"


def attempt_addresses(orchestrator: Orchestrator) -> list[str]:
    """Return the addresses of the records of attempts of all tasks of this execution."""
    root = orchestrator.shared_address("phases")
    if not root or not orchestrator.execution():
        return []
    execution = f"{root}/{orchestrator.execution()}"
    return [f"{execution}/{key}" for key in Storage(execution, retry=False).names()]
