"""Base model: downloaded once from the hub into the cluster's storage or model cache, on a CPU; GPUs do not wait for a hub."""

import hashlib
import logging
from pathlib import Path

from flytekit import Cache, FlyteContextManager, Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune.failures.table import RETRIES
from flytune.hardware import load_cluster
from flytune.models import BaseRequest, shared_cache
from flytune.models import base as models_base
from flytune.planning import pod_disk
from images import LIGHT
from tasks.runtime.directories import BASE_REQUEST, is_local, new_folder
from tasks.runtime.retries import classify_failures
from tasks.runtime.schema import without_schema
from tasks.runtime.secrets import secrets
from tasks.runtime.volumes import light_pod

logger = logging.getLogger(__name__)
# Raise it when the same request would store other files.
CACHE_VERSION = "1"
_PODS = Resources(cpu="2", mem="4Gi", ephemeral_storage=f"{pod_disk.FETCH_BASE_GIB}Gi")


def _cache_version() -> str:
    """Return a version that changes with cluster.yaml's model_cache, where outputs of this task then are."""
    folder = load_cluster().model_cache
    return CACHE_VERSION if folder is None else f"{CACHE_VERSION}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"


@without_schema
@task(
    container_image=LIGHT,
    pod_template=light_pod(),
    cache=Cache(version=_cache_version()),
    requests=_PODS,
    limits=_PODS,
    retries=RETRIES,
    secret_requests=secrets("hub"),
)
def fetch_base_model(base: BaseRequest) -> FlyteDirectory:
    """Store a Hugging Face cache with the model at its commit; only its name if no copy is needed.

    None is needed for a folder, an address or a local run, and where cluster.yaml's model_cache has the model.
    """
    if is_local() or base.commit is None:
        return _name_alone(base)
    scratch = new_folder() / "hub"
    with classify_failures():
        if _is_in_model_cache(base, scratch):
            return _name_alone(base)
    files = FlyteContextManager.current_context().file_access
    address = files.get_random_remote_directory()
    with classify_failures():
        models_base.copy_from_hub(base, lambda file, name: files.put_data(str(file), f"{address}/{name}"), scratch)
    return FlyteDirectory(address)


def _name_alone(base: BaseRequest) -> FlyteDirectory:
    folder = new_folder() / "base"
    folder.mkdir()
    base.write(folder / BASE_REQUEST)
    return FlyteDirectory(str(folder))


def _is_in_model_cache(base: BaseRequest, scratch: Path) -> bool:
    """Return whether the cluster's model cache has the model, after a download if it can be written."""
    cluster = load_cluster()
    if cluster.model_cache is None:
        return False
    volume = cluster.volume_at(cluster.model_cache, None)
    assert volume is not None
    found = shared_cache.fill(base, Path(cluster.model_cache), scratch, volume.read_only)
    if found is None:
        logger.warning(
            "%s lacks files of %s at %s, and its volume is read-only: the model is copied to the cluster's storage",
            cluster.model_cache,
            base.name_or_path,
            base.commit,
        )
    return found is not None
