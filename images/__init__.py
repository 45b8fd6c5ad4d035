"""Names of the two container images: TRAIN for tasks that train and evaluate, LIGHT for those that plan,
prepare and store.

Evaluation runs in TRAIN because it needs torch, and the GPUs on which the model is loaded.

Environment variables, read when workflows are registered; an empty one is as good as none, except
FLYTUNE_FLASH_ATTN:
    FLYTUNE_IMAGES    `dockerfile` (default): images built from the Dockerfile and pushed;
                      `imagespec`: flytekit builds and pushes them from the same locks when it registers
    FLYTUNE_REGISTRY  registry of the images: ghcr.io/someone
    FLYTUNE_TAG       tag of the Dockerfile's images; `dev` if not set
    FLYTUNE_FLASH_ATTN  version of FlashAttention in ImageSpec's image; none if set and empty

A pod that registers tasks itself (a dynamic task's) has none of these: it gets FLYTUNE_IMAGES, and the names
that the registration has found, in FLYTUNE_TRAIN_IMAGE and FLYTUNE_LIGHT_IMAGE (`environment`).
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Union

from flytune.errors import FlytuneError

if TYPE_CHECKING:
    from flytekit import ImageSpec

_Image = Union[str, "ImageSpec"]

ROOT = Path(__file__).resolve().parent.parent
CUDA = "13.0.1"
"""CUDA version of torch 2.13; DeepSpeed refuses to compile its operators with another minor version."""
PYTHON = "3.11"
FLASH_ATTN = "2.8.3.post2"
"""Last release of FlashAttention 2, compiled from source. A complete build with torch 2.13 and CUDA 13 has
not been tested."""
LIGER_KERNEL = "0.8.5"
"""Liger's kernels, in no lock: their Triton is torch's for CUDA, which machines without a GPU do not have."""
APT_PACKAGES = ["build-essential", "libaio-dev"]

BUILD_FLASH_ATTN = Path(__file__).with_name("build_flash_attn.sh")
INSTALL_FLASH_ATTN = (
    "find /tmp/wheels -name '*.whl' -exec python -m pip install --no-cache-dir --no-deps {} +"
)
COMPILE_DEEPSPEED = Path(__file__).with_name("compile_deepspeed.sh")


def images(kind: str, registry: str | None, tag: str, flash_attn: str = FLASH_ATTN) -> tuple[_Image, _Image]:
    """Return TRAIN and LIGHT.

    Raises:
        FlytuneError: `kind` is neither `dockerfile` nor `imagespec`.
    """
    registry = (registry or "").rstrip("/") or None
    if kind == "dockerfile":
        prefix = f"{registry}/" if registry else ""
        return f"{prefix}flytune-train:{tag}", f"{prefix}flytune-light:{tag}"
    if kind == "imagespec":
        # Flyte 1's own: pods of Flyte 2 have no flytekit.
        from flytekit import ImageSpec

        train = ImageSpec(
            name="flytune-train",
            registry=registry,
            base_image=f"nvidia/cuda:{CUDA}-devel-ubuntu24.04",
            python_version=PYTHON,
            apt_packages=APT_PACKAGES,
            packages=["pip", "wheel"],
            requirements=str(ROOT / "requirements.lock"),
            commands=[
                f"export FLASH_ATTN={flash_attn}",
                *_commands(BUILD_FLASH_ATTN),
                f"python -m pip install --no-cache-dir --no-deps liger-kernel=={LIGER_KERNEL}",
                INSTALL_FLASH_ATTN,
                *_commands(COMPILE_DEEPSPEED),
            ],
        )
        light = ImageSpec(
            name="flytune-light",
            registry=registry,
            python_version=PYTHON,
            requirements=str(ROOT / "requirements-light.lock"),
        )
        return train, light
    raise FlytuneError(f"FLYTUNE_IMAGES={kind}: unknown; give `dockerfile` or `imagespec`")


def _commands(script: Path) -> list[str]:
    lines = script.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


_KIND = os.environ.get("FLYTUNE_IMAGES") or "dockerfile"
HAS_NUMERIC_USER = _KIND == "dockerfile"
"""True if the images name their user by its number, which Kubernetes can check not to be root; ImageSpec's do
not."""
PYTHONPATH = "/app:/opt/site" if HAS_NUMERIC_USER else "/root"
"""PYTHONPATH of the images: the project's folder, and for the Dockerfile's that of sitecustomize.py."""
_NAMES = {"TRAIN": "FLYTUNE_TRAIN_IMAGE", "LIGHT": "FLYTUNE_LIGHT_IMAGE"}


def _registered() -> tuple[_Image, _Image]:
    train, light = (os.environ.get(_NAMES[one]) for one in ("TRAIN", "LIGHT"))
    if train and light:
        return train, light
    return images(
        _KIND,
        os.environ.get("FLYTUNE_REGISTRY"),
        os.environ.get("FLYTUNE_TAG") or "dev",
        os.environ.get("FLYTUNE_FLASH_ATTN", FLASH_ATTN),
    )


TRAIN, LIGHT = _registered()


def environment() -> dict[str, str]:
    """Return the variables by which a pod names the images as this registration does; those of ImageSpec are
    built before."""
    return {"FLYTUNE_IMAGES": _KIND, _NAMES["TRAIN"]: _name(TRAIN), _NAMES["LIGHT"]: _name(LIGHT)}


def _name(image: _Image) -> str:
    if isinstance(image, str):
        return image
    from flytekit.image_spec.image_spec import ImageBuildEngine

    # Builders may give the image another name, which flytekit knows after the build.
    ImageBuildEngine.build(image)
    return str(image.image_name())
