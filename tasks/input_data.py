"""Training data that an upstream task hands on: stored by its content, and named in the recipe.

Flyte gives each output of a task an address of its own. Prepared data and checkpoints are found by what a recipe says, so that
its data gets an address that depends on its content alone.
"""

import hashlib
import json
import os
from pathlib import Path

from flytekit import FlyteContextManager, Resources, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from flytekit.types.structured import StructuredDataset

from flytune import caches
from flytune.errors import DataError
from flytune.failures.table import RETRIES
from flytune.files import sha256_of
from flytune.recipe import Recipe
from flytune.storage import Storage
from images import LIGHT
from tasks.runtime.directories import new_folder, shared_address
from tasks.runtime.retries import classify_failures
from tasks.runtime.schema import without_schema
from tasks.runtime.volumes import light_pod

ORIGIN = "_origin.json"
"""Name of the record of where data came from; readers of data skip names that begin with an underscore."""
_PODS = {"requests": Resources(cpu="1", mem="2Gi", ephemeral_storage="20Gi"), "retries": RETRIES}


@without_schema
@task(container_image=LIGHT, pod_template=light_pod(), **_PODS)
def name_file(recipe: Recipe, data: FlyteFile) -> Recipe:
    """Return the recipe with a file as its training data."""
    with classify_failures():
        path = Path(data.download())
        return named(recipe, {path.name: path}, str(data.remote_source or path))


@without_schema
@task(container_image=LIGHT, pod_template=light_pod(), **_PODS)
def name_folder(recipe: Recipe, data: FlyteDirectory) -> Recipe:
    """Return the recipe with a folder of files as its training data."""
    with classify_failures():
        root = Path(data.download())
        files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
        return named(recipe, files, str(data.remote_source or root))


@without_schema
@task(container_image=LIGHT, pod_template=light_pod(), **_PODS)
def name_dataset(recipe: Recipe, data: StructuredDataset) -> Recipe:
    """Return the recipe with a structured dataset as its training data; its Parquet files have no suffix."""
    with classify_failures():
        literal = data.literal
        origin = str(literal.uri if literal is not None else data.uri)
        form = (literal.metadata.structured_dataset_type.format if literal is not None else data.file_format) or "parquet"
        if form != "parquet":
            raise DataError(f"{origin}: a structured dataset in the format {form}; write Parquet, which is flytekit's default")
        root = new_folder()
        FlyteContextManager.current_context().file_access.get_data(origin, str(root / "data"), is_multipart=True)
        place = root / "data"
        found = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
        return named(recipe, {f"{path.stem}.parquet": path for path in found if not path.name.startswith("_")}, origin)


def named(recipe: Recipe, files: dict[str, Path], origin: str) -> Recipe:
    """Store files at an address that their content names, and return the recipe with that as its data.path.

    Raises:
        DataError: there is no file, or the recipe has several sources.
    """
    if recipe.data.sources:
        raise DataError("data.sources: several sources, and one input; write data.path: upstream:// in their place")
    if not files:
        raise DataError(f"{origin}: no file in this input")
    listed = "".join(f"{sha256_of(path)} {name}\n" for name, path in sorted(files.items()))
    digest = hashlib.sha256(listed.encode()).hexdigest()[:32]
    root = f"{shared_address('data') or caches.hub_folder('data')}/{digest}"
    storage = Storage(root, "data", error=DataError)
    # The record is written last: it shows that all files are there.
    if not storage.exists(ORIGIN):
        for name, path in files.items():
            storage.copy(path, name)
        execution = os.environ.get("FLYTE_INTERNAL_EXECUTION_ID", "")
        storage.write(ORIGIN, json.dumps({"address": origin, "execution": execution}, indent=2).encode())
    address = f"{root}/{next(iter(files))}" if len(files) == 1 else root
    content = recipe.data.model_dump() | {"path": address, "dataset_name": None, "dataset_config": None, "revision": None}
    return recipe.model_copy(update={"data": type(recipe.data).model_validate(content)})
