"""Base model: downloaded once from the hub into the cluster's storage, on a CPU; pods with GPUs do not contact a hub."""

from flytekit import Cache, FlyteContextManager, Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune.failures.table import RETRIES
from flytune.models import BaseRequest
from flytune.models import base as models_base
from images import LIGHT
from tasks.runtime.directories import is_local, new_folder
from tasks.runtime.retries import classify_failures
from tasks.runtime.schema import without_schema
from tasks.runtime.secrets import secrets
from tasks.runtime.volumes import light_pod

# Raise it when the same request would store other files.
CACHE_VERSION = "1"
# The pod's disk holds one file of weights at a time.
_PODS = Resources(cpu="2", mem="4Gi", ephemeral_storage="24Gi")


@without_schema
@task(
    container_image=LIGHT,
    pod_template=light_pod(),
    cache=Cache(version=CACHE_VERSION),
    requests=_PODS,
    limits=_PODS,
    retries=RETRIES,
    secret_requests=secrets("hub"),
)
def fetch_base_model(base: BaseRequest) -> FlyteDirectory:
    """Store a Hugging Face cache with the model at its commit; for a folder, an address or a local run only its name."""
    if is_local() or base.commit is None:
        folder = new_folder() / "base"
        folder.mkdir()
        base.write(folder / "base.json")
        return FlyteDirectory(str(folder))
    files = FlyteContextManager.current_context().file_access
    address = files.get_random_remote_directory()
    with classify_failures():
        models_base.copy_from_hub(base, lambda file, name: files.put_data(str(file), f"{address}/{name}"), new_folder() / "hub")
    return FlyteDirectory(address)
