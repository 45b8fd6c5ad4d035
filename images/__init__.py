"""Names of the two container images: TRAIN for tasks that train and evaluate, LIGHT for those that plan, prepare and store.

Evaluation runs in TRAIN because it needs torch, and the GPUs on which the model is loaded.

Environment variables, read when workflows are registered:
    FLYTUNE_IMAGES    `dockerfile` (default): images built from the Dockerfile and pushed;
                      `imagespec`: flytekit builds and pushes them from the same locks when it registers
    FLYTUNE_REGISTRY  registry of the images: ghcr.io/someone
    FLYTUNE_TAG       tag of the Dockerfile's images; `dev` if not set
    FLYTUNE_FLASH_ATTN  version of FlashAttention in ImageSpec's image; none if set and empty
"""

import os
from pathlib import Path

from flytekit import ImageSpec

from flytune.errors import FlytuneError

ROOT = Path(__file__).resolve().parent.parent
CUDA = "13.0.1"
"""CUDA version of torch 2.13; DeepSpeed refuses to compile its operators with another minor version."""
PYTHON = "3.11"
FLASH_ATTN = "2.8.3.post2"
"""Last release of FlashAttention 2, compiled from source. A complete build with torch 2.13 and CUDA 13 has not been tested."""
LIGER_KERNEL = "0.8.5"
"""Liger's kernels, in no lock: their Triton is torch's for CUDA, which machines without a GPU do not have."""
APT_PACKAGES = ["build-essential", "libaio-dev"]

BUILD_FLASH_ATTN = Path(__file__).with_name("build_flash_attn.sh")
INSTALL_FLASH_ATTN = "find /tmp/wheels -name '*.whl' -exec python -m pip install --no-cache-dir --no-deps {} +"
COMPILE_DEEPSPEED = Path(__file__).with_name("compile_deepspeed.sh")


def images(kind: str, registry: str | None, tag: str, flash_attn: str = FLASH_ATTN) -> tuple[str | ImageSpec, str | ImageSpec]:
    """Return TRAIN and LIGHT.

    Raises:
        FlytuneError: `kind` is neither `dockerfile` nor `imagespec`.
    """
    if kind == "dockerfile":
        prefix = f"{registry}/" if registry else ""
        return f"{prefix}flytune-train:{tag}", f"{prefix}flytune-light:{tag}"
    if kind == "imagespec":
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


_KIND = os.environ.get("FLYTUNE_IMAGES", "dockerfile")
HAS_NUMERIC_USER = _KIND == "dockerfile"
"""True if the images name their user by its number, which Kubernetes can check not to be root; ImageSpec's do not."""
PYTHONPATH = "/app:/opt/site" if HAS_NUMERIC_USER else "/root"
"""PYTHONPATH of the images: the project's folder, and for the Dockerfile's that of sitecustomize.py."""
TRAIN, LIGHT = images(
    _KIND,
    os.environ.get("FLYTUNE_REGISTRY") or None,
    os.environ.get("FLYTUNE_TAG", "dev"),
    os.environ.get("FLYTUNE_FLASH_ATTN", FLASH_ATTN),
)
