"""Pod templates and declarations of tasks for the rows of shapes.yaml and for cluster.yaml."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from flytekit import PodTemplate, task
from flytekit.extras import accelerators

import images
from flytune import patches
from flytune.hardware import Cluster, Shape, load_cluster, load_shapes
from flytune.pods import Image, spec
from flytune.pods.security import PRIMARY
from flytune.stages.calls import check_devices
from tasks.runtime import termination
from tasks.runtime.retries import classify_failures
from tasks.runtime.schema import without_schema


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


def _image() -> Image:
    return Image(images.HAS_NUMERIC_USER, images.PYTHONPATH)


def accelerator(shape: Shape) -> Any:
    """Return Flyte's accelerator for the shape's GPU, which the cluster turns into node affinity; None if
    Flyte has none."""
    return getattr(accelerators, shape.accelerator.replace("-", "_"), None) if shape.is_gpu else None


def _after_device_check(execute: Callable[..., Any], shape: Shape) -> Callable[..., Any]:
    """Return a task's `execute` that first compares the node's GPUs with the row, before it fetches or loads
    a model."""

    def checked(**inputs: Any) -> Any:
        with classify_failures():
            check_devices(shape)
        return execute(**inputs)

    return checked


def declare(
    function: Callable[..., Any], name: str, shape: Shape, module: dict[str, Any], **arguments: Any
) -> Any:
    """Declare a separate Flyte task for one shape: a copy of `function` under `name`, with the shape's pod.

    The copy is added to `module` under that name, because a pod loads its task by module and name. Flyte
    refuses tasks made from inner functions, and one function cannot be two tasks.
    """
    code, known = function.__code__, function.__globals__
    copy = types.FunctionType(code, known, name, function.__defaults__, function.__closure__)
    functools.update_wrapper(copy, function, assigned=("__annotations__", "__doc__", "__module__"))
    # By it flytekit knows a function that another module has made.
    copy.__wrapped__ = inspect.unwrap(function)  # type: ignore[attr-defined]
    copy.__qualname__ = name
    cluster = load_cluster()
    cluster.check_shapes({row.name for row in load_shapes()})
    made = task(
        pod_template=pod_template(shape, cluster),
        accelerator=accelerator(shape),
        interruptible=shape.spot,
        retries=shape.retries,
        labels=spec.job_labels(shape, cluster),
        **arguments,
    )(copy)
    if "task_config" not in arguments:  # ranks check for themselves, in their own processes
        patches.flytekit.EXECUTE.on(made, _after_device_check(made.execute, shape))
    patches.flytekit.EXECUTE.on(made, termination.ignoring_sigterm_after(made.execute))
    module[name] = without_schema(made)
    return module[name]
