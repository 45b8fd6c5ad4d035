"""Prepare, on CPUs: the GPU task never tokenizes."""

import logging
import shutil
from pathlib import Path

from filelock import FileLock, Timeout
from flytekit import Cache, Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune import data
from flytune.data.progress import PROGRESS, Progress, digest_of
from flytune.data.shards import MANIFEST
from flytune.errors import DataError
from flytune.failures.table import RETRIES
from flytune.recipe.recipe import DataRequest
from images import LIGHT
from tasks.runtime.directories import fresh
from tasks.runtime.retries import retried
from tasks.runtime.schema import trimmed
from tasks.runtime.secrets import secrets

logger = logging.getLogger(__name__)
# Raise it when the same request would prepare other bytes.
CACHE_VERSION = "4"
# Limits as well: as many processes are started as the container has cores, and each holds a tokenizer.
_PODS = Resources(cpu="4", mem="16Gi")


@trimmed
@task(
    container_image=LIGHT,
    cache=Cache(version=CACHE_VERSION, ignored_inputs=("keep",)),
    requests=_PODS,
    limits=_PODS,
    retries=RETRIES,
    secret_requests=secrets("hub"),
)
def prepare_data(request: DataRequest, keep: str) -> FlyteDirectory:
    """Tokenized parquet shards with a manifest; cached by the content of the data, not by its address.

    What is done is kept below the folder `keep` until all is: an attempt that is killed is gone on with by the next one that
    sees the same folder.
    """
    folder = fresh("dataset")
    work = Path(keep) / f"preparing-{CACHE_VERSION}-{digest_of(request)[:16]}"
    lock = FileLock(work.with_suffix(".lock"))
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except (OSError, Timeout) as error:  # no such mount in this pod; or somebody prepares the same at this moment
        logger.warning("%s: %s; nothing is kept should this attempt be killed", keep, error)
        with retried():
            data.prepare(request, folder)
        return FlyteDirectory(str(folder))
    try:
        if not (work / MANIFEST).exists() or (work / PROGRESS).exists():
            with retried():
                data.prepare(request, work)
        shutil.move(work, folder)
    except DataError:
        if (work / PROGRESS).exists() and len(Progress.read(work / PROGRESS).train.shards) < 2:  # soon made again
            shutil.rmtree(work)
        raise
    finally:
        Path(lock.lock_file).unlink()
        lock.release()
    return FlyteDirectory(str(folder))
