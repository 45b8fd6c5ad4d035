"""A row of shapes.yaml as Flyte sees it: resources, accelerator and pod template."""

import types
from collections.abc import Callable
from typing import Any

from flytekit import PodTemplate, Resources, Secret, task
from flytekit.extras import accelerators
from kubernetes.client import V1Container, V1EmptyDirVolumeSource, V1PodSpec, V1Volume, V1VolumeMount

from flytune.cluster import load_cluster
from flytune.shapes import Shape

PRIMARY = "primary"


def resources(shape: Shape) -> Resources:
    """What one pod of the shape asks for, and its limit. Strings: the Kubernetes models refuse numbers."""
    return Resources(
        cpu=str(shape.cpu),
        mem=f"{shape.memory_gib}Gi",
        gpu=str(shape.processes) if shape.is_gpu else None,
        ephemeral_storage=f"{shape.disk_gib}Gi",
    )


def pod_template(shape: Shape) -> PodTemplate:
    """A pod with a memory-backed /dev/shm, which counts as its memory; a new one at each call: plugins write in it."""
    memory = V1EmptyDirVolumeSource(medium="Memory", size_limit=f"{shape.shared_memory_gib}Gi")
    container = V1Container(name=PRIMARY, volume_mounts=[V1VolumeMount(name="dshm", mount_path="/dev/shm")])
    spec = V1PodSpec(containers=[container], volumes=[V1Volume(name="dshm", empty_dir=memory)])
    return PodTemplate(pod_spec=spec, primary_container_name=PRIMARY)


def accelerator(shape: Shape) -> Any:
    """Flyte's name for the shape's GPU, which the cluster turns into a node selector; None where Flyte has none."""
    return getattr(accelerators, shape.accelerator.replace("-", "_"), None) if shape.is_gpu else None


def secrets(asker: str) -> list[Secret]:
    """What cluster.yaml has for those who ask as `hub`, `tracking` or `notify`, as environment variables."""
    return [
        Secret(group=key.group, key=key.key, env_var=key.env_var, mount_requirement=Secret.MountType.ENV_VAR)
        for key in getattr(load_cluster().secrets, asker)
    ]


def declare(function: Callable[..., Any], name: str, shape: Shape, module: dict[str, Any], **arguments: Any) -> Any:
    """A Flyte task of its own for one shape: `function` under another name, declared with the shape's pod.

    The copy stands in its module under that name, for a pod finds its task by module and name. Flyte refuses tasks made
    from inner functions, and one function cannot be two tasks.
    """
    copy = types.FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
    copy.__annotations__, copy.__doc__ = function.__annotations__, function.__doc__
    copy.__qualname__, copy.__module__ = name, function.__module__
    asked = resources(shape)
    module[name] = task(
        requests=asked, limits=asked, pod_template=pod_template(shape), accelerator=accelerator(shape), **arguments
    )(copy)
    return module[name]
