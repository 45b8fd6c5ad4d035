"""Volumes of a cluster: the rows of `volumes` in cluster.yaml, and the pods that mount each."""

from pathlib import PurePosixPath
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from flytune import limits
from flytune.schema import Strict

SOURCES = ("persistent_volume_claim", "csi", "nfs", "host_path")
"""Fields of a volume of which it has exactly one."""
_IMAGE_FOLDERS = (
    "/",
    "/app",
    "/bin",
    "/etc",
    "/home",
    "/lib",
    "/lib64",
    "/opt",
    "/root",
    "/sbin",
    "/tmp",
    "/usr",
    "/var",
)
"""Folders of the images that a volume must not hide; folders below them may be mounted."""
_POD_FOLDERS = ("/code", "/dev", "/proc", "/scratch", "/sys")
"""Folders that pods have of their own, with all below them."""

Text = Annotated[str, Field(min_length=1)]
Absolute = Annotated[str, Field(pattern="^/")]


class Csi(Strict):
    """A volume that a CSI driver makes for the pod: an inline volume of Kubernetes, without a claim."""

    driver: Text
    """Name of the driver, as `kubectl get csidrivers` lists it."""
    fs_type: str | None = None
    """File system, for drivers that ask for one."""
    volume_attributes: dict[str, str] = Field(default={})
    """The driver's own settings, for example the name of a bucket."""
    node_publish_secret: str | None = None
    """Name of the Kubernetes secret that the driver gets."""


class Nfs(Strict):
    """A folder that an NFS server exports."""

    server: Text
    path: Absolute


class Volume(Strict):
    """A volume that Flytune mounts into pods, from exactly one of a claim, a CSI driver, an NFS server and a
    host path."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
    persistent_volume_claim: Text | None = None
    """Name of a claim in the namespace of the project and domain."""
    csi: Csi | None = None
    nfs: Nfs | None = None
    host_path: Absolute | None = None
    """A folder of the node, which must exist."""
    mount_path: str
    """Absolute path of the volume's folder in the pods."""
    read_only: bool = False
    """True if pods must not write to it."""
    shared: bool | None = None
    """True if all pods that mount it see the same files; by default true, except for a host path."""
    shapes: list[str] = Field(default=[])
    """Rows of shapes.yaml whose pods mount it; all by default."""
    light_tasks: bool = True
    """True if the pods of the light tasks (plan, data, base model, storage) mount it as well."""
    group: Annotated[int, Field(ge=1, le=limits.SEED)] | None = None
    """Id of a group that pods join, because its folders are writable for that group (NFS, host paths)."""
    read_gbs: Annotated[float, Field(gt=0, le=limits.RATE)] | None = None
    """GB/s (1e9 bytes) at which one node reads from it, for the forecast of the time to load a model."""
    total_read_gbs: Annotated[float, Field(gt=0, le=limits.RATE)] | None = None
    """GB/s at which all nodes together read from it; by default each node has its own `read_gbs`."""

    @field_validator("name")
    @classmethod
    def _name_is_free(cls, name: str) -> str:
        if name in ("dshm", "scratch", "flytune-code", "flytune-tmp"):
            raise ValueError(f"{name}: pods have a volume of this name; give another one")
        return name

    @field_validator("mount_path")
    @classmethod
    def _mount_path_is_free(cls, path: str) -> str:
        place = PurePosixPath(path)
        if not path.startswith("/") or path.startswith("//") or ".." in place.parts or ":" in path:
            raise ValueError(f"{path}: write an absolute path, for example /mnt/checkpoints")
        if str(place) in _IMAGE_FOLDERS or any(place.is_relative_to(folder) for folder in _POD_FOLDERS):
            raise ValueError(
                f"{path}: it would hide files that pods need there; mount it at a path such as "
                "/mnt/checkpoints"
            )
        return str(place)

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        sources = [source for source in SOURCES if getattr(self, source) is not None]
        if len(sources) != 1:
            raise ValueError(
                f"volume {self.name} needs exactly one of {', '.join(SOURCES)}; it has "
                f"{' and '.join(sources) or 'none'}"
            )
        if self.total_read_gbs is not None and self.read_gbs is None:
            raise ValueError(
                f"volume {self.name} has total_read_gbs, which limits the sum of the nodes' rates; add "
                "read_gbs"
            )
        return self

    @property
    def is_shared(self) -> bool:
        """True if all pods that mount it see the same files."""
        return self.host_path is None if self.shared is None else self.shared

    def is_mounted_by(self, shape: str | None) -> bool:
        """Return whether the pods of a shape mount it; with None, whether those of the light tasks do."""
        if shape is None:
            return self.light_tasks
        return not self.shapes or shape in self.shapes

    def has(self, path: str) -> bool:
        """Return whether an absolute path is its folder or below it."""
        return PurePosixPath(path).is_relative_to(self.mount_path)

    def meets(self, other: "Volume") -> bool:
        """Return whether some pod mounts both."""
        if self.light_tasks and other.light_tasks:
            return True
        return not self.shapes or not other.shapes or bool(set(self.shapes) & set(other.shapes))
