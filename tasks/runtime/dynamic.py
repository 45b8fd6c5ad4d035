"""Settings of the registration that the pod of a dynamic task gets, without the laptop's own."""

from typing import Any, TypeVar

from flytekit.configuration import SERIALIZED_CONTEXT_ENV_VAR, SerializationSettings

from flytune import patches

_Task = TypeVar("_Task", bound=Any)


def without_laptop(task: _Task) -> _Task:
    """Leave the folder of the checkout and the address of its git remote out of a dynamic task's pod; return
    the task.

    flytekit compresses all settings into a variable of the pod. The address may have credentials.
    """
    original = task.get_k8s_pod
    patches.flytekit.POD.on(task, lambda settings: original(_cleared(settings)))
    return task


def _cleared(settings: SerializationSettings) -> SerializationSettings:
    sent, cleared = (
        SerializationSettings.from_transport(settings.serialized_context).new_builder(),
        settings.new_builder(),
    )
    # No task is without resources of its own; registration sends empty ones, a package none.
    sent.git_repo = sent.source_root = sent.default_resources = None
    cleared.env = {**(settings.env or {}), SERIALIZED_CONTEXT_ENV_VAR: sent.build().serialized_context}
    return cleared.build()
