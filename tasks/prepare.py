"""Data preparation on CPUs: the GPU task never tokenizes."""

import logging
import shutil
from pathlib import Path

from filelock import FileLock, Timeout
from flytekit import Cache, Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune import data
from flytune.data import Progress, digest_of
from flytune.data.progress import PROGRESS
from flytune.data.shards import MANIFEST
from flytune.errors import DataError
from flytune.failures.table import RETRIES
from flytune.planning import pod_disk
from flytune.recipe import DataRequest
from images import LIGHT
from tasks.runtime.directories import new_folder
from tasks.runtime.retries import classify_failures
from tasks.runtime.schema import without_schema
from tasks.runtime.secrets import secrets
from tasks.runtime.volumes import light_pod

logger = logging.getLogger(__name__)
# Raise it when the same request would prepare other bytes.
CACHE_VERSION = "4"
# Requests and limits: the task starts one process for each core of the container, and each process holds a tokenizer.
_PODS = Resources(cpu="4", mem="16Gi", ephemeral_storage=f"{pod_disk.PREPARE_GIB}Gi")


@without_schema
@task(
    container_image=LIGHT,
    pod_template=light_pod(),
    cache=Cache(version=CACHE_VERSION, ignored_inputs=("scratch_folder",)),
    requests=_PODS,
    limits=_PODS,
    retries=RETRIES,
    secret_requests=secrets("hub"),
)
def prepare_data(request: DataRequest, scratch_folder: str) -> FlyteDirectory:
    """Write tokenized parquet shards with a manifest; cached by the content of the data, not by its address.

    Finished shards stay below `scratch_folder` until all are done: a retry that shares the folder continues where a killed
    attempt stopped.
    """
    folder = new_folder() / "dataset"
    work = Path(scratch_folder) / f"preparing-{CACHE_VERSION}-{digest_of(request)[:16]}"
    lock = FileLock(work.with_suffix(".lock"))
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except (OSError, Timeout) as error:  # no such mount in this pod, or another task prepares the same data now
        logger.warning("%s: %s; a retry of this attempt would start again", scratch_folder, error)
        with classify_failures():
            data.prepare(request, folder)
        return FlyteDirectory(str(folder))
    try:
        if not (work / MANIFEST).exists() or (work / PROGRESS).exists():
            with classify_failures():
                data.prepare(request, work)
        shutil.move(work, folder)
    except DataError:
        if (work / PROGRESS).exists() and len(Progress.read(work / PROGRESS).train.shards) < 2:  # quickly made again
            shutil.rmtree(work)
        raise
    finally:
        Path(lock.lock_file).unlink()
        lock.release()
    return FlyteDirectory(str(folder))
