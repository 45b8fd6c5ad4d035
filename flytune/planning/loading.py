"""The time to bring a base model's weights from where they are to the processes that train, at each attempt.

A model of the hub or at an address is downloaded by each node to its disk, and read from there; a model on a
volume is read from the volume. Rates are those of cluster.yaml and shapes.yaml. Where these give none, they
are taken from LambdaLabsML's distributed-training-guide (05-training-llama-405b/README.md), where Llama 3.1
405B, 811 GB, is initialized on 8 nodes in 50 minutes from a shared drive and in 3 minutes from a node's own
disk; the rate of an object store is assumed.
"""

from flytune.hardware import Cluster, Shape, Volume
from flytune.models import base
from flytune.recipe import Recipe
from flytune.records import Loading
from flytune.sharding import sharding_of
from training_estimates import Workload

SHARED_DRIVE_GBS = 811 / (50 * 60)
"""GB/s of all nodes together from a volume without read_gbs: the published run's."""
NVME_GBS = 811 / (3 * 60)
"""GB/s from a node's NVMe disk, for rows without disk_read_gbs: the published run's."""
DISK_GBS = 0.25
"""GB/s from a node's other disk, for rows without disk_read_gbs: assumed, of a network disk."""
STORE_GBS = 0.5
"""GB/s at which a node downloads from the cluster's storage, without store_read_gbs: assumed, of one process
with s3fs."""


def forecast(recipe: Recipe, shape: Shape, workload: Workload, cluster: Cluster) -> Loading | None:
    """Return the time of an attempt to load the base model on a cluster; None on a shape without GPUs, whose
    runs are local."""
    if not shape.is_gpu:
        return None
    size = workload.geometry.parameters * (4.0 if workload.geometry.dtype == "float32" else 2.0)
    sharding = sharding_of(recipe)
    # Of slices, each process reads its own; otherwise each node reads all files, from its page cache after
    # the first time.
    share = 1 / shape.nodes if sharding.reads_slices else 1.0
    name = recipe.model.name_or_path
    if volume := volume_of(name, shape, cluster):
        seconds, rate = _of_volume(volume, size * share, shape.nodes)
        return Loading(
            source=f"volume {volume.name}",
            bytes=round(size),
            parts={f"volume {volume.name} ({rate})": seconds},
        )
    store = min(cluster.store_read_gbs or STORE_GBS, shape.fabric.gbs)
    disk = shape.disk_read_gbs or (NVME_GBS if shape.nvme else DISK_GBS)
    told = ("" if cluster.store_read_gbs else ", assumed", "" if shape.disk_read_gbs else ", assumed")
    return Loading(
        source="the cluster's storage",
        bytes=round(size),
        parts={
            f"the cluster's storage ({store:.3g} GB/s a node{told[0]})": size / store / 1e9,
            f"each node's disk ({disk:.3g} GB/s{told[1]})": size * share / disk / 1e9,
        },
    )


def volume_of(name: str, shape: Shape, cluster: Cluster) -> Volume | None:
    """Return the volume that pods read the model from; None for a model that they download.

    Whether a cache that pods cannot write has the model is unknown here, so that a download is counted.
    """
    if name.startswith("/"):
        return cluster.volume_at(name, shape.name)
    if cluster.model_cache is None or base.is_address(name) or base.is_path(name):
        return None
    volume = cluster.volume_at(cluster.model_cache, shape.name)
    return None if volume is None or volume.read_only else volume


def _of_volume(volume: Volume, node_bytes: float, nodes: int) -> tuple[float, str]:
    """Return the seconds until all nodes have read so many bytes each, and the rate in words."""
    if volume.read_gbs is None:
        return (
            nodes * node_bytes / SHARED_DRIVE_GBS / 1e9,
            f"{SHARED_DRIVE_GBS:.2f} GB/s for all nodes, assumed",
        )
    alone = node_bytes / volume.read_gbs / 1e9
    if volume.total_read_gbs is None or nodes * volume.read_gbs <= volume.total_read_gbs:
        return alone, f"{volume.read_gbs:.3g} GB/s a node"
    return nodes * node_bytes / volume.total_read_gbs / 1e9, f"{volume.total_read_gbs:.3g} GB/s for all nodes"
