"""Pods of the rows of shapes.yaml and of the light tasks, as arguments of a task's `override`."""

from datetime import timedelta
from typing import Any

import flyte
from flyte._internal.runtime.resources_serde import ACCELERATOR_DEVICE_MAP

import images
from flyte2.runtime.ranks import RanksOfJob
from flytune.hardware import Cluster, Shape, load_cluster, load_shapes, shape_named
from flytune.pods import Image, spec
from flytune.pods.security import PRIMARY
from flytune.recipe import Recipe
from flytune.stages.calls import processes_of, row_of
from flytune.stages.table import Resources, Stage

_ACCELERATORS = {"A100-80GB": "A100_80G", "L40S": "L40s"}
"""Names of accelerators that the SDK spells otherwise."""


def on_shape(stage: Stage, key: str) -> dict[str, Any]:
    """Return what a call of a stage on a row of shapes.yaml overrides; `key` is the row's name, or a route.

    Raises:
        RecipeError: there is no such row.
    """
    shape, cluster = shape_named(row_of(key)), load_cluster()
    cluster.check_shapes({row.name for row in load_shapes()})
    fields = _pod(shape if stage.place == "shape" else shape.one_node, cluster)
    processes = processes_of(stage, key)
    return fields | ({"plugin_config": RanksOfJob(shape.nodes, processes)} if processes else {})


def _pod(shape: Shape, cluster: Cluster) -> dict[str, Any]:
    labels = spec.labels(shape) | (spec.job_labels(shape, cluster) or {})
    fields: dict[str, Any] = {
        "pod_template": flyte.PodTemplate(
            pod_spec=spec.of_shape(shape, cluster, _image()),
            primary_container_name=PRIMARY,
            labels=labels,
            annotations=spec.annotations(shape, cluster) or None,
        ),
        "retries": shape.retries,
        "interruptible": shape.spot,
    }
    name = _ACCELERATORS.get(shape.accelerator, shape.accelerator)
    if name in ACCELERATOR_DEVICE_MAP:
        # Its count is added to the pod's as the resource `gpu`, which Flyte takes for the nvidia.com/gpu that
        # is there.
        fields["resources"] = flyte.Resources(gpu=flyte.Device(shape.processes, "GPU", name))
    return fields


def deadline(recipe: Recipe, shape: Shape) -> flyte.Timeout:
    """Return the time after which the platform ends a stage that trains, all attempts included; 0 is no
    bound.

    The run itself ends at hardware.max_hours and exports what it has; this is the bound of one that cannot.
    """
    hours = recipe.hardware.max_hours
    if hours is None:
        return flyte.Timeout()
    start = timedelta(minutes=load_cluster().node_start_minutes)
    return flyte.Timeout(deadline=(1 + shape.retries) * (timedelta(hours=hours) + start))


def light(requests: Resources) -> flyte.PodTemplate:
    """Return the pod of a light task. Its requests are in it: Flyte's own Resources have no limit of disk."""
    from kubernetes.client import V1ResourceRequirements

    amounts = {"cpu": str(requests.cpu), "memory": f"{requests.memory_gib}Gi"}
    if requests.disk_gib is not None:
        amounts["ephemeral-storage"] = f"{requests.disk_gib}Gi"
    pod = spec.of_light_task(load_cluster(), _image(), {})
    pod.containers[0].resources = V1ResourceRequirements(
        requests=amounts, limits=dict(amounts) if requests.is_limit else None
    )
    return flyte.PodTemplate(pod_spec=pod, primary_container_name=PRIMARY)


def _image() -> Image:
    return Image(images.HAS_NUMERIC_USER, images.PYTHONPATH)
