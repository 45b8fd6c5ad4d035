"""Shapes, accelerators, networks, the cluster."""

from flytune.hardware.accelerators import accelerator_named, load_accelerators
from flytune.hardware.cluster import Cluster, SecretKey, Secrets, load_cluster
from flytune.hardware.shapes import Shape, load_shapes
from flytune.hardware.this_machine import shape_named
from flytune.hardware.volumes import Volume

__all__ = [
    "Cluster",
    "SecretKey",
    "Secrets",
    "Shape",
    "Volume",
    "accelerator_named",
    "load_accelerators",
    "load_cluster",
    "load_shapes",
    "shape_named",
]
