"""The base model, once: from the hub into the cluster's storage, on a CPU; pods with GPUs ask no hub."""

from flytekit import Cache, FlyteContextManager, Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune.failures.table import RETRIES
from flytune.models import base as models_base
from flytune.models.base import BaseRequest
from images import LIGHT
from tasks.runtime.directories import fresh, is_local
from tasks.runtime.retries import retried
from tasks.runtime.schema import trimmed
from tasks.runtime.secrets import secrets

# Raise it when the same request would store other files. One file of weights at a time is on the pod's disk.
CACHE_VERSION = "1"
_PODS = Resources(cpu="2", mem="4Gi", ephemeral_storage="24Gi")


@trimmed
@task(
    container_image=LIGHT,
    cache=Cache(version=CACHE_VERSION),
    requests=_PODS,
    limits=_PODS,
    retries=RETRIES,
    secret_requests=secrets("hub"),
)
def fetch_base_model(base: BaseRequest) -> FlyteDirectory:
    """A Hugging Face cache with the model at its commit; for a folder, an address, or a run on this machine its name alone."""
    if is_local() or base.commit is None:
        folder = fresh("base")
        folder.mkdir()
        base.write(folder / "base.json")
        return FlyteDirectory(str(folder))
    files = FlyteContextManager.current_context().file_access
    place = files.get_random_remote_directory()
    with retried():
        models_base.copy_from_hub(base, lambda file, name: files.put_data(str(file), f"{place}/{name}"), fresh("hub"))
    return FlyteDirectory(place)
