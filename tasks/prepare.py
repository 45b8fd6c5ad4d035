"""Prepare, on a CPU: the GPU task never tokenizes."""

from flytekit import Cache, Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune import data
from flytune.recipe import DataRequest
from images import LIGHT
from tasks.folders import fresh

# Raise it when the same request would prepare other bytes.
CACHE_VERSION = "2"


@task(container_image=LIGHT, cache=Cache(version=CACHE_VERSION), requests=Resources(cpu="4", mem="16Gi"))
def prepare_data(request: DataRequest) -> FlyteDirectory:
    """Tokenized parquet shards with a manifest; cached by the content of the data, not by its address."""
    folder = fresh("dataset")
    data.prepare(request, folder)
    return FlyteDirectory(str(folder))
