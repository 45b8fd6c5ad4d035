"""Settings of a cluster that hold for all shapes: cluster.yaml, read where tasks are declared."""

import os
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from flytune import limits
from flytune.errors import RecipeError
from flytune.files import SETTINGS
from flytune.hardware.volumes import Volume
from flytune.schema import Strict
from flytune.written_files import load_yaml, validated

CLUSTER_FILE = SETTINGS / "cluster.yaml"


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

    @property
    def all(self) -> list[SecretKey]:
        """All secrets, of every kind of task."""
        return [*self.hub, *self.tracking, *self.notify]


class PodSecurity(Strict):
    """Restrictions of all pods; a cluster where a part does not work switches that part off."""

    read_only_root: bool = True
    """True if the images' files are read-only in pods; /tmp, the folder of fast registration and /scratch
    stay writable."""
    restricted: bool = True
    """True for Kubernetes' policy `restricted`: not root, no capabilities, no new privileges, seccomp
    RuntimeDefault."""
    service_account_token: bool = False
    """True if pods get the token with which their service account may use Kubernetes' API; no task uses
    it."""
    user: Annotated[int, Field(ge=1)] | None = 10001
    """Id of the user and group that pods run as, by default the images'; null where the cluster chooses it
    (OpenShift)."""


class Cluster(Strict):
    """The content of cluster.yaml."""

    gang_scheduling: Literal["none", "kueue", "volcano", "coscheduling"] = "none"
    """Scheduler that starts either all nodes of a run or none: none, Kueue, Volcano, the scheduler
    plugins."""
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
    node_start_minutes: Annotated[float, Field(gt=0, le=limits.MINUTES)] = 30.0
    """Longest time between the starts of a run's first and last node, image pull included."""
    plan_in_training_image: bool = False
    """True if pods that plan have the training image: its torch traces models that the closed form does not
    know."""
    volumes: list[Volume] = Field(default=[])
    """Volumes of the pods; paths of a recipe below their mount paths are not uploaded."""
    model_cache: str | None = None
    """Folder on a volume, as a Hugging Face cache: base models of the hub are downloaded there once, and read
    from there."""
    store_read_gbs: Annotated[float, Field(gt=0, le=limits.RATE)] | None = None
    """GB/s (1e9 bytes) at which one node downloads from the cluster's object storage, for the forecast of the
    time to load."""
    secrets: Secrets = Secrets()
    pod_security: PodSecurity = PodSecurity()

    @model_validator(mode="before")
    @classmethod
    def _without_mounted(cls, content: Any) -> Any:
        if isinstance(content, dict) and "mounted" in content:
            rows = ", ".join(
                f"{{name: {Path(str(path)).name or 'NAME'}, persistent_volume_claim: CLAIM, mount_path: "
                f"{path}}}"
                for path in content["mounted"] or ["/mnt/models"]
            )
            raise ValueError(
                "mounted: replaced by volumes, whose mount paths are the folders that are not uploaded, and "
                f"which Flytune mounts itself; write volumes: [{rows}], with the claim, or csi, nfs or "
                "host_path, that the pods mount"
            )
        return content

    @model_validator(mode="after")
    def _volumes_apart(self) -> Self:
        for volume, other in combinations(self.volumes, 2):
            for field in ("name", "mount_path"):
                if getattr(volume, field) == getattr(other, field) and (
                    field == "name" or volume.meets(other)
                ):
                    raise ValueError(
                        f"volumes: {volume.name} and {other.name} have the same {field}, "
                        f"{getattr(volume, field)}; give each its own"
                        + (", or other shapes and light_tasks: false" if field == "mount_path" else "")
                    )
        return self

    @model_validator(mode="after")
    def _cache_on_a_volume(self) -> Self:
        if self.model_cache is None:
            return self
        where = f"model_cache: {self.model_cache}"
        volume = self.volume_at(self.model_cache, None) if self.model_cache.startswith("/") else None
        if volume is None:
            raise ValueError(
                f"{where}: no volume of the light tasks' pods is mounted there; name a folder below a "
                "mount_path"
            )
        if volume.shapes:
            raise ValueError(
                f"{where}: volume {volume.name} is mounted into some shapes' pods only; all read models there"
            )
        if not volume.is_shared:
            raise ValueError(
                f"{where}: volume {volume.name} is another folder on each node; if all nodes have the same "
                "file system there, write shared: true"
            )
        return self

    @model_validator(mode="after")
    def _queue_named(self) -> Self:
        if self.gang_scheduling == "kueue" and not self.queue:
            raise ValueError("gang_scheduling: kueue needs queue: the name of a local queue")
        return self

    def volumes_of(self, shape: str | None) -> list[Volume]:
        """Return the volumes that the pods of a shape mount; with None, those of the pods of the light
        tasks."""
        return [volume for volume in self.volumes if volume.is_mounted_by(shape)]

    def volume_at(self, path: str, shape: str | None) -> Volume | None:
        """Return the volume with that absolute path in the pods of a shape, or with None of the light tasks;
        None without."""
        place = os.path.abspath(path)
        holding = [volume for volume in self.volumes_of(shape) if volume.has(place)]
        return max(holding, key=lambda volume: len(volume.mount_path), default=None)

    def has_mounted(self, path: str) -> bool:
        """Return whether an absolute path is on a volume of any pods."""
        return any(volume.has(os.path.abspath(path)) for volume in self.volumes)

    def check_shapes(self, names: set[str]) -> None:
        """Compare the shapes that volumes name with the rows of shapes.yaml.

        Raises:
            RecipeError: a volume names another one.
        """
        unknown = {volume.name: sorted(set(volume.shapes) - names) for volume in self.volumes}
        if lines := [
            f"volumes: {name}: shapes: no row {', '.join(wrong)} in shapes.yaml; there are "
            f"{', '.join(sorted(names))}"
            for name, wrong in unknown.items()
            if wrong
        ]:
            raise RecipeError.of(CLUSTER_FILE.name, lines)


@cache
def load_cluster(path: Path = CLUSTER_FILE) -> Cluster:
    """Read cluster.yaml.

    Raises:
        RecipeError: the file is missing, or has mistakes, which are all listed.
    """
    return validated(load_yaml(path) or {}, Cluster, str(path))
