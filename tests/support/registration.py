"""Serialized tasks, as they are registered, and the variables that name their images."""

import importlib.util
import os
from collections import OrderedDict

import pytest
from flytekit.configuration import FastSerializationSettings, Image, ImageConfig, SerializationSettings
from flytekit.image_spec.image_spec import ImageBuildEngine, ImageSpecBuilder
from flytekit.tools.translator import get_serializable

import images

SETTINGS = SerializationSettings(
    project="p",
    domain="d",
    version="v",
    image_config=ImageConfig(default_image=Image(name="default", fqn="i", tag="t")),
)
FAST = (
    SETTINGS.new_builder()
    .with_fast_serialization_settings(
        FastSerializationSettings(
            enabled=True, destination_dir=".", distribution_location="s3://flyte/code.tar.gz"
        )
    )
    .build()
)
"""Settings of fast registration."""


def proto(task, settings=SETTINGS):
    return get_serializable(OrderedDict(), settings, task).template.to_flyte_idl()


def limits(pod):
    return pod["containers"][0]["resources"]["limits"]


REGISTRATIONS = [
    {},
    {"FLYTUNE_REGISTRY": "ghcr.io/someone"},
    {"FLYTUNE_TAG": "v2"},
    {"FLYTUNE_REGISTRY": "ghcr.io/someone/", "FLYTUNE_TAG": "v2"},
    {"FLYTUNE_IMAGES": "imagespec"},
    {"FLYTUNE_IMAGES": "imagespec", "FLYTUNE_REGISTRY": "ghcr.io/someone/"},
    {"FLYTUNE_IMAGES": "imagespec", "FLYTUNE_FLASH_ATTN": ""},
    {"FLYTUNE_IMAGES": "imagespec", "FLYTUNE_FLASH_ATTN": "2.8.0"},
]
"""Variables of a laptop that registers."""


@pytest.fixture
def imported(monkeypatch):
    """Return a function that returns `images` as a process with only the given variables of Flytune's imports
    it."""

    def imported(environment):
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("FLYTUNE_")]:
                patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            spec = importlib.util.spec_from_file_location("images_of_a_process", images.__file__)
            made = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(made)
        return made

    return imported


class Builder(ImageSpecBuilder):
    """Stand-in for a builder that gives its images names of its own."""

    def should_build(self, image_spec):
        return True

    def build_image(self, image_spec):
        return f"built.example.com/{image_spec.image_name().replace('/', '-')}"


@pytest.fixture
def builder(monkeypatch):
    """Make flytekit build ImageSpec's images with that stand-in."""
    monkeypatch.setitem(ImageBuildEngine.get_registry(), "stand-in", (Builder(), 99))
    monkeypatch.setattr(ImageBuildEngine, "_IMAGE_NAME_TO_REAL_NAME", {})
    ImageBuildEngine.build.cache_clear()
