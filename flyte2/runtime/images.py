"""Images of the tasks: those of Flyte 1, built with the packages of the extra `flyte2`."""

import flyte

import images
from flytune.errors import FlytuneError
from flytune.hardware import load_cluster
from flytune.stages.table import Stage


def of(stage: Stage) -> flyte.Image:
    """Return the image of a stage.

    Raises:
        FlytuneError: the images are to be built by flytekit.
    """
    plans_in_train = stage.place == "plan" and load_cluster().plan_in_training_image
    name = images.TRAIN if stage.place in ("node", "shape") or plans_in_train else images.LIGHT
    return named(name)


def light() -> flyte.Image:
    """Return the image of the tasks that call stages."""
    return named(images.LIGHT)


def named(name: object) -> flyte.Image:
    """Return an image that is built already."""
    if not isinstance(name, str):
        raise FlytuneError(
            "FLYTUNE_IMAGES=imagespec: flytekit builds these images; on Flyte 2 give `dockerfile`"
        )
    return flyte.Image.from_base(name)
