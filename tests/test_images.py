import re
import subprocess
import sys
from pathlib import Path

import pytest
from flytekit import ImageSpec
from flytekit.image_spec.default_builder import create_docker_context
from flytekit.tools.ignore import DockerIgnore, FlyteIgnore, IgnoreGroup

import images
from flytune.errors import FlytuneError
from flytune.shapes import load_shapes

DOCKERFILE = (images.ROOT / "Dockerfile").read_text(encoding="utf-8")


def rendered(spec: str | ImageSpec, folder: Path) -> tuple[str, str]:
    """The Dockerfile and the requirements that ImageSpec's builder makes; no docker is asked."""
    assert isinstance(spec, ImageSpec)
    create_docker_context(spec, folder)
    return (folder / "Dockerfile").read_text(), (folder / "requirements_uv.txt").read_text()


def argument(name: str) -> str:
    found = re.search(rf"^ARG {name}=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert found, name
    return found[1]


def test_images_are_names_unless_asked_otherwise():
    assert images.images("dockerfile", None, "dev") == ("flytune-train:dev", "flytune-light:dev")
    assert images.images("dockerfile", "ghcr.io/someone", "v1")[0] == "ghcr.io/someone/flytune-train:v1"


def test_an_unknown_kind_is_told():
    with pytest.raises(FlytuneError, match="FLYTUNE_IMAGES=podman: unknown; give `dockerfile` or `imagespec`"):
        images.images("podman", None, "dev")


def test_the_environment_chooses():
    code = "import images, sys; print(type(images.TRAIN).__name__, images.LIGHT, 'torch' in sys.modules)"
    environment = {"FLYTUNE_REGISTRY": "ghcr.io/someone", "FLYTUNE_TAG": "v2", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=images.ROOT, check=True, env=environment
    )
    assert done.stdout.split() == ["str", "ghcr.io/someone/flytune-light:v2", "False"]


def test_imagespec_renders_the_training_image(tmp_path):
    train, _ = images.images("imagespec", "ghcr.io/someone", "dev")
    dockerfile, requirements = rendered(train, tmp_path)
    assert f"FROM nvidia/cuda:{images.CUDA}-devel-ubuntu24.04" in dockerfile
    assert "build-essential libaio-dev" in dockerfile
    assert "DS_BUILD_CPU_ADAM=1" in dockerfile
    assert (images.ROOT / "requirements.lock").read_text().strip() in requirements
    assert train.image_name().startswith("ghcr.io/someone/flytune-train:")


def test_imagespec_renders_the_light_image(tmp_path):
    dockerfile, requirements = rendered(images.images("imagespec", None, "dev")[1], tmp_path)
    assert "cuda:" not in dockerfile
    assert (images.ROOT / "requirements-light.lock").read_text().strip() in requirements
    assert not re.search(r"^torch\b", requirements, re.MULTILINE)


def test_both_ways_install_the_same():
    assert (argument("CUDA"), argument("PYTHON")) == (images.CUDA, images.PYTHON)
    assert f"--no-install-recommends {' '.join(images.APT_PACKAGES)} " in DOCKERFILE
    for needed in ("requirements.lock", "requirements-light.lock", "images/compile_deepspeed.sh"):
        assert f"COPY {needed} /tmp/\n" in DOCKERFILE
        assert (images.ROOT / needed).is_file()


def test_the_compile_script_is_shell_one_command_a_line(tmp_path):
    commands = images._commands(images.COMPILE_DEEPSPEED)
    assert all(not command.endswith("\\") for command in commands)
    joined = tmp_path / "joined.sh"
    joined.write_text(" && ".join(commands))
    subprocess.run(["bash", "-n", str(joined)], check=True)


@pytest.mark.parametrize("target", ["light", "train"])
def test_each_target_drops_root_finds_the_project_and_says_its_revision(target):
    stage = re.split(r"^FROM .* AS ", DOCKERFILE, flags=re.MULTILINE)
    (text,) = [part for part in stage if part.startswith(f"{target}\n")]
    for needed in ("USER 10001", "WORKDIR /app", "PYTHONPATH=/app", "COPY --chown=flytune . .", "image.revision=${REVISION}"):
        assert needed in text
    assert text.index("USER 10001") < text.index("RUN python -c")


def test_pods_get_what_they_read_and_nothing_else():
    ignored = IgnoreGroup(str(images.ROOT), [DockerIgnore, FlyteIgnore]).is_ignored
    needed = [
        "shapes.yaml",
        "accelerators.yaml",
        "recipes/demo-qlora.yaml",
        "deepspeed_configs/zero3.json",
        "flytune/data/__init__.py",
    ]
    assert [path for path in [*needed, "tasks/train.py", "workflows/finetune.py", "images/__init__.py"] if ignored(path)] == []
    left_out = [".venv/bin/python", ".git/config", ".demo/models/x", "tests/test_recipe.py", "docs/design.md", ".checkpoints/a"]
    left_out += ["flytune/__pycache__/a.pyc", ".mypy_cache/a", "benchmarks/a.py", "flytune.egg-info/PKG-INFO", "Dockerfile"]
    assert [path for path in left_out if not ignored(path)] == []
    assert not DockerIgnore(images.ROOT).is_ignored("requirements.lock")


def test_ignore_files_have_no_blank_line():
    for name in (".dockerignore", ".flyteignore"):
        assert all(line.strip() for line in (images.ROOT / name).read_text().splitlines()), name


def test_deepspeed_is_compiled_for_every_gpu_that_shapes_name():
    capability = {"T4": "7.5", "L4": "8.9", "A10G": "8.6", "A100-80GB": "8.0", "H100": "9.0"}
    compiled = re.search(r"TORCH_CUDA_ARCH_LIST='([^']+)'", images.COMPILE_DEEPSPEED.read_text())
    assert compiled
    asked = {shape.accelerator for shape in load_shapes() if shape.is_gpu}
    assert {capability[name] for name in asked} <= set(compiled[1].split(";"))
