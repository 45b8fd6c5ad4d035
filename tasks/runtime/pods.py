"""Pods of the rows of shapes.yaml and of the light tasks, as arguments of flytekit's `task`."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from flytekit import PodTemplate, Resources
from flytekit.extras import accelerators

import images
from flytune.hardware import Cluster, Shape, load_cluster, load_shapes
from flytune.pods import Image, spec
from flytune.pods.security import PRIMARY
from flytune.stages import table


class LazyPodTemplate(PodTemplate):
    """Pod template whose spec is made where a task is registered: pods that only run it do not import
    Kubernetes' client."""

    def __init__(
        self, make: Callable[[], Any], labels: Mapping[str, str] = {}, annotations: Mapping[str, str] = {}
    ) -> None:
        # Not the dataclass's own: it makes a spec where it gets none.
        self._make = make
        self.primary_container_name = PRIMARY
        self.labels, self.annotations = dict(labels) or None, dict(annotations) or None

    @cached_property
    def pod_spec(self) -> Any:
        """Pod spec, a V1PodSpec of Kubernetes' client; new for each template, because plugins modify it."""
        return self._make()


def pod_template(shape: Shape, cluster: Cluster) -> PodTemplate:
    """Return the pod template of one node; a new one for each call, because plugins modify it."""
    return LazyPodTemplate(
        lambda: spec.of_shape(shape, cluster, _image()), spec.labels(shape), spec.annotations(shape, cluster)
    )


def light_pod(environment: Callable[[], Mapping[str, str]] = dict) -> PodTemplate:
    """Return the pod template of a light task, a new one for each call.

    `environment` returns the container's variables; it is called where the task is registered.
    """
    return LazyPodTemplate(lambda: spec.of_light_task(load_cluster(), _image(), environment()))


def light(requests: table.Resources, environment: Callable[[], Mapping[str, str]] = dict) -> dict[str, Any]:
    """Return the arguments of a light task: its pod, and what it requests."""
    disk = requests.disk_gib
    resources = Resources(
        cpu=str(requests.cpu),
        mem=f"{requests.memory_gib}Gi",
        ephemeral_storage=None if disk is None else f"{disk}Gi",
    )
    return {
        "pod_template": light_pod(environment),
        "requests": resources,
        "limits": resources if requests.is_limit else None,
    }


def _image() -> Image:
    return Image(images.HAS_NUMERIC_USER, images.PYTHONPATH)


def accelerator(shape: Shape) -> Any:
    """Return Flyte's accelerator for the shape's GPU, which the cluster turns into node affinity; None if
    Flyte has none."""
    return getattr(accelerators, shape.accelerator.replace("-", "_"), None) if shape.is_gpu else None


def on_shape(shape: Shape) -> dict[str, Any]:
    """Return the arguments of a task on a shape: its pod, image, and attempts."""
    cluster = load_cluster()
    cluster.check_shapes({row.name for row in load_shapes()})
    return {
        "container_image": images.TRAIN,
        "pod_template": pod_template(shape, cluster),
        "accelerator": accelerator(shape),
        "interruptible": shape.spot,
        "retries": shape.retries,
        "labels": spec.job_labels(shape, cluster),
    }
