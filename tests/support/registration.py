"""Serialized tasks, as they are registered."""

from collections import OrderedDict

from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.tools.translator import get_serializable

SETTINGS = SerializationSettings(
    project="p", domain="d", version="v", image_config=ImageConfig(default_image=Image(name="default", fqn="i", tag="t"))
)


def proto(task):
    return get_serializable(OrderedDict(), SETTINGS, task).template.to_flyte_idl()


def limits(pod):
    return pod["containers"][0]["resources"]["limits"]
