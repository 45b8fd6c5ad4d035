"""Tests of what a registration puts into the pods of a sweep's stages, which declare the tasks of their
points."""

from dataclasses import replace

import pytest
from flytekit.configuration import Image, ImageConfig
from flytekit.core.python_function_task import PythonFunctionTask

import images
import workflows.sweep
from tests.support.paths import ROOT
from tests.support.propeller import container_of, image_name
from tests.support.registration import FAST, REGISTRATIONS, SETTINGS, builder, imported, proto  # noqa: F401 (fixtures)

DYNAMIC = PythonFunctionTask.ExecutionBehavior.DYNAMIC
STAGES = [var for var in vars(workflows.sweep).values() if getattr(var, "execution_mode", None) == DYNAMIC]


@pytest.mark.slow
@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize("settings", [FAST, SETTINGS], ids=["fast", "in the image"])
@pytest.mark.parametrize(
    "variables", REGISTRATIONS, ids=lambda one: " ".join(f"{key}={value}" for key, value in one.items())
)
def test_a_stage_s_pod_names_the_images_of_the_registration(variables, settings, imported, monkeypatch):  # noqa: F811
    registered = imported(variables)
    for name in ("TRAIN", "LIGHT", "_KIND", "HAS_NUMERIC_USER", "PYTHONPATH"):
        monkeypatch.setattr(images, name, getattr(registered, name))
    # flytekit adds the images of ImageSpec to the configuration.
    own = ImageConfig(default_image=Image(name="default", fqn="i", tag="t"))
    settings = replace(settings, image_config=own, source_root=str(ROOT))
    assert len(STAGES) == 5
    for stage in STAGES:
        monkeypatch.setattr(stage, "_container_image", images.TRAIN)
        monkeypatch.delitem(vars(stage.pod_template), "pod_spec", raising=False)
        template = proto(stage, settings)
        monkeypatch.delitem(vars(stage.pod_template), "pod_spec")
        _, own_variables = container_of(template)
        in_pod = imported(
            {name: value for name, value in own_variables.items() if name.startswith("FLYTUNE_")}
        )
        light = images.LIGHT if isinstance(images.LIGHT, str) else images.LIGHT.image_name()
        assert (image_name(template), light) == (in_pod.TRAIN, in_pod.LIGHT)
        assert (in_pod.HAS_NUMERIC_USER, in_pod.PYTHONPATH) == (
            registered.HAS_NUMERIC_USER,
            registered.PYTHONPATH,
        )
        if variables.get("FLYTUNE_IMAGES") == "imagespec":
            assert all(name.startswith("built.example.com/") for name in (in_pod.TRAIN, in_pod.LIGHT))
        assert "//" not in f"{in_pod.TRAIN} {in_pod.LIGHT}"
