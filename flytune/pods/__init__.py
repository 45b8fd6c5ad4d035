"""Pods as Kubernetes' V1PodSpec: machines, volumes, disk, security."""

from flytune.pods.security import Image

__all__ = ["Image"]
