"""What is so on your cluster, whatever the shape: cluster.yaml, read where tasks are declared."""

from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from flytune.errors import RecipeError
from flytune.schema import Strict, load_yaml, mistakes

CLUSTER_FILE = Path(__file__).resolve().parents[2] / "cluster.yaml"


class SecretKey(Strict):
    """A secret of the cluster, and the environment variable that pods see it in."""

    env_var: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
    group: str | None = None
    """The Kubernetes secret's name; none on Union, where a key is enough."""
    key: Annotated[str, Field(min_length=1)]


class Secrets(Strict):
    """By who asks for them; a pod gets no other."""

    hub: list[SecretKey] = Field(default=[])
    """CPU tasks that read from the hub or publish to it."""
    tracking: list[SecretKey] = Field(default=[])
    """Tasks that train: trackers' keys; HF_TOKEN too, for publish.every_save."""
    notify: list[SecretKey] = Field(default=[])
    """The tasks that tell how a run ended."""


class Cluster(Strict):
    """The content of cluster.yaml."""

    gang_scheduling: Literal["none", "kueue", "volcano", "coscheduling"] = "none"
    """Who sees to it that all nodes of a run start together, or none: nobody, Kueue, Volcano, the scheduler plugins."""
    queue: str | None = None
    """Kueue's local queue, or Volcano's."""
    spot_taints: list[str] = Field(default=[])
    """Keys of the taints that keep other pods off spot nodes."""
    zone_label: str = "topology.kubernetes.io/zone"
    """The nodes of one run share its value."""
    scratch_storage_class: str | None = None
    """The storage class of /scratch; when not set, the node's own ephemeral storage."""
    infiniband_resource: str = "rdma/ib"
    """What the cluster's RDMA device plugin calls a device."""
    node_start_minutes: Annotated[float, Field(gt=0)] = 30.0
    """That the nodes of one run may come up apart, image pull included."""
    mounted: list[str] = Field(default=[])
    """Folders that pods have by other means than Flytune's: what a recipe names below them is not uploaded."""
    secrets: Secrets = Secrets()

    @model_validator(mode="after")
    def _queue_named(self) -> Self:
        if self.gang_scheduling == "kueue" and not self.queue:
            raise ValueError("gang_scheduling: kueue needs queue: the name of a local queue")
        return self


@cache
def load_cluster(path: Path = CLUSTER_FILE) -> Cluster:
    """Reads cluster.yaml.

    Raises:
        RecipeError: the file is missing, or lists all its mistakes.
    """
    try:
        return Cluster.model_validate(load_yaml(path) or {})
    except ValidationError as error:
        raise RecipeError.of(str(path), mistakes(error, Cluster)) from None
