"""Base model: downloaded once from the hub into the cluster's storage or model cache, on a CPU; GPUs do not
wait for a hub."""

import hashlib
import logging
from pathlib import Path

from filelock import FileLock

from flytune import caches
from flytune.errors import DataError
from flytune.hardware import load_cluster
from flytune.models import BaseRequest
from flytune.models import base as models_base
from flytune.models.base import fill_shared_cache, link_shared_cache
from flytune.stages import stored
from flytune.stages.orchestrator import Folder, Orchestrator

logger = logging.getLogger(__name__)
BASE_REQUEST = "base.json"
"""File with the request of a base model whose files were not copied."""


def fetch_base_model(orchestrator: Orchestrator, base: BaseRequest) -> Folder:
    """Store a Hugging Face cache with the model at its commit; only its name if no copy is needed.

    None is needed for a folder, an address or a local run, and where cluster.yaml's model_cache has the
    model.
    """
    if orchestrator.is_local() or base.commit is None:
        return _name_alone(orchestrator, base)
    scratch = orchestrator.new_folder() / "hub"
    if _is_in_model_cache(base, scratch):
        return _name_alone(orchestrator, base)
    address = orchestrator.new_address()
    models_base.copy_from_hub(base, lambda file, name: orchestrator.store(file, f"{address}/{name}"), scratch)
    return Folder(address, scratch)


def _name_alone(orchestrator: Orchestrator, request: BaseRequest) -> Folder:
    folder = orchestrator.new_folder() / "base"
    folder.mkdir()
    request.write(folder / BASE_REQUEST)
    return Folder.here(folder)


def _is_in_model_cache(request: BaseRequest, scratch: Path) -> bool:
    """Return whether the cluster's model cache has the model, after a download if it can be written."""
    cluster = load_cluster()
    if cluster.model_cache is None:
        return False
    volume = cluster.volume_at(cluster.model_cache, None)
    assert volume is not None
    cached = fill_shared_cache(request, Path(cluster.model_cache), scratch, volume.read_only)
    if cached is None:
        logger.warning(
            "%s lacks files of %s at %s, and its volume is read-only: the model is copied to the cluster's "
            "storage",
            cluster.model_cache,
            request.name_or_path,
            request.commit,
        )
    return cached is not None


def unpack(orchestrator: Orchestrator, files: Folder | None) -> None:
    """Bring the files of fetch_base_model into this node's Hugging Face cache, once even if many workers
    request them.

    They are downloaded, or linked where they are in cluster.yaml's model_cache.

    Raises:
        DataError: the stored files are gone.
    """
    if files is None or files.is_here:
        return
    cache = caches.hub_folder("")
    done = cache / f".unpacked-{hashlib.sha256(files.address.encode()).hexdigest()[:16]}"
    with FileLock(done.with_suffix(".lock")):
        if done.exists():
            return
        try:
            if not _link_from_model_cache(orchestrator, files, cache):
                orchestrator.fetch(files.address, cache, is_folder=True)
        except FileNotFoundError:
            raise DataError(
                f"{files.address}: the stored base model is gone; run again with --overwrite-cache, which "
                "fetches it again"
            ) from None
        done.touch()


def _link_from_model_cache(orchestrator: Orchestrator, files: Folder, cache: Path) -> bool:
    """Link a model that is in cluster.yaml's model_cache; return False if fetch_base_model has copied its
    files."""
    if (folder := load_cluster().model_cache) is None:
        return False
    try:
        request = BaseRequest.read(stored.local_file(orchestrator, files, BASE_REQUEST))
    except FileNotFoundError:
        return False
    if request.commit is None:
        return False
    link_shared_cache(request, Path(folder), cache)
    return True
