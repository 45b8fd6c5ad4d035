"""Settings of a cluster that hold for all shapes: cluster.yaml, read where tasks are declared."""

from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from flytune.errors import RecipeError
from flytune.schema import Strict, load_yaml, mistakes

CLUSTER_FILE = Path(__file__).resolve().parents[2] / "cluster.yaml"


class SecretKey(Strict):
    """A secret of the cluster, and the environment variable in which pods get it."""

    env_var: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
    group: str | None = None
    """Name of the Kubernetes secret; None on Union, where a key is enough."""
    key: Annotated[str, Field(min_length=1)]


class Secrets(Strict):
    """Secrets by kind of task; a pod gets no others."""

    hub: list[SecretKey] = Field(default=[])
    """CPU tasks that read from the hub or publish to it."""
    tracking: list[SecretKey] = Field(default=[])
    """Tasks that train: trackers' keys; HF_TOKEN too, for publish.every_save."""
    notify: list[SecretKey] = Field(default=[])
    """Tasks that send notifications of a run's end."""


class Cluster(Strict):
    """The content of cluster.yaml."""

    gang_scheduling: Literal["none", "kueue", "volcano", "coscheduling"] = "none"
    """Scheduler that starts either all nodes of a run or none: none, Kueue, Volcano, the scheduler plugins."""
    queue: str | None = None
    """Local queue of Kueue, or queue of Volcano."""
    spot_taints: list[str] = Field(default=[])
    """Keys of the taints that keep other pods off spot nodes."""
    zone_label: str = "topology.kubernetes.io/zone"
    """Label whose value the nodes of one run share."""
    scratch_storage_class: str | None = None
    """The storage class of /scratch; when not set, the node's own ephemeral storage."""
    infiniband_resource: str = "rdma/ib"
    """Resource name of the cluster's RDMA device plugin."""
    node_start_minutes: Annotated[float, Field(gt=0)] = 30.0
    """Longest time between the starts of a run's first and last node, image pull included."""
    mounted: list[str] = Field(default=[])
    """Folders that are mounted into pods by other means than Flytune: paths of a recipe below them are not uploaded."""
    secrets: Secrets = Secrets()

    @model_validator(mode="after")
    def _queue_named(self) -> Self:
        if self.gang_scheduling == "kueue" and not self.queue:
            raise ValueError("gang_scheduling: kueue needs queue: the name of a local queue")
        return self


@cache
def load_cluster(path: Path = CLUSTER_FILE) -> Cluster:
    """Read cluster.yaml.

    Raises:
        RecipeError: the file is missing, or has mistakes, which are all listed.
    """
    try:
        return Cluster.model_validate(load_yaml(path) or {})
    except ValidationError as error:
        raise RecipeError.of(str(path), mistakes(error, Cluster)) from None
