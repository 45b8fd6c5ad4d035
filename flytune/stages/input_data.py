"""Training data that an upstream task hands on: stored by its content, and named in the recipe.

Each output of a task gets an address of its own. Prepared data and checkpoints are found by what a recipe
says, so that its data gets an address that depends on its content alone.
"""

import hashlib
import json
from pathlib import Path

from flytune import caches
from flytune.errors import DataError
from flytune.files import sha256_of
from flytune.recipe import Recipe
from flytune.stages.orchestrator import File, Folder, Orchestrator, StoredRows
from flytune.stages.stored import local
from flytune.storage import Storage

ORIGIN = "_origin.json"
"""Name of the record of where data came from; readers of data skip names that begin with an underscore."""


def name_file(orchestrator: Orchestrator, recipe: Recipe, data: File) -> Recipe:
    """Return the recipe with a file as its training data."""
    path = local(orchestrator, data)
    return named(orchestrator, recipe, {path.name: path}, data.address)


def name_folder(orchestrator: Orchestrator, recipe: Recipe, data: Folder) -> Recipe:
    """Return the recipe with a folder of files as its training data."""
    if not data.is_here:
        orchestrator.fetch(data.address, data.path, is_folder=True)
    files = {
        path.relative_to(data.path).as_posix(): path
        for path in sorted(data.path.rglob("*"))
        if path.is_file()
    }
    return named(orchestrator, recipe, files, data.address)


def name_dataset(orchestrator: Orchestrator, recipe: Recipe, data: StoredRows) -> Recipe:
    """Return the recipe with a structured dataset as its training data; its Parquet files have no suffix."""
    if data.format != "parquet":
        raise DataError(
            f"{data.address}: a structured dataset in the format {data.format}; write Parquet, which is "
            "flytekit's default"
        )
    place = orchestrator.new_folder() / "data"
    orchestrator.fetch(data.address, place, is_folder=True)
    paths = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    files = {f"{path.stem}.parquet": path for path in paths if not path.name.startswith("_")}
    return named(orchestrator, recipe, files, data.address)


def named(orchestrator: Orchestrator, recipe: Recipe, files: dict[str, Path], origin: str) -> Recipe:
    """Store files at an address that their content names, and return the recipe with that as its data.path.

    Raises:
        DataError: there is no file, or the recipe has several sources.
    """
    if recipe.data.sources:
        raise DataError(
            "data.sources: several sources, and one input; write data.path: upstream:// in their place"
        )
    if not files:
        raise DataError(f"{origin}: no file in this input")
    listed = "".join(f"{sha256_of(path)} {name}\n" for name, path in sorted(files.items()))
    digest = hashlib.sha256(listed.encode()).hexdigest()[:32]
    root = f"{orchestrator.shared_address('data') or caches.hub_folder('data')}/{digest}"
    storage = Storage(root, "data", error=DataError)
    # The record is written last: it shows that all files are there.
    if not storage.exists(ORIGIN):
        for name, path in files.items():
            storage.copy(path, name)
        record = {"address": origin, "execution": orchestrator.execution()}
        storage.write(ORIGIN, json.dumps(record, indent=2).encode())
    address = f"{root}/{next(iter(files))}" if len(files) == 1 else root
    content = recipe.data.model_dump() | {
        "path": address,
        "dataset_name": None,
        "dataset_config": None,
        "revision": None,
    }
    return recipe.model_copy(update={"data": type(recipe.data).model_validate(content)})
