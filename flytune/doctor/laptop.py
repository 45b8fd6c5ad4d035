"""Checks of this machine, for planning, submitting and running."""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from sys import version_info
from types import MappingProxyType

from flytune import yaml_core
from flytune.doctor.finding import Finding, fail, ok, warn
from flytune.errors import RecipeError
from flytune.files import ROOT
from flytune.hardware import Shape, load_cluster, load_shapes, this_machine
from flytune.hardware.cluster import CLUSTER_FILE
from flytune.hardware.shapes import GIB, SHAPES_FILE
from flytune.recipe import VllmEngine, read_recipe
from flytune.sentences import counted

PYTHONS = ((3, 11), (3, 12), (3, 13))
"""Versions of Python in pyproject.toml."""
_WITHOUT_FLYTEKIT = (3, 13)
"""The version from which flytekit 1.16 cannot be installed."""
DISK_GIB, MEMORY_GIB, TEMPORARY_GIB = 10, 6, 4
"""Free space that the demo needs, for the environment and its small models; other runs may need more, as in
their plans."""
_SECONDS = 5.0
VLLM = VllmEngine.model_fields["python"].default
"""Interpreter of vLLM's environment, where a recipe names no other."""


def findings() -> Iterator[Finding]:
    """Check this machine."""
    yield python((version_info.major, version_info.minor))
    has_torch = importlib.util.find_spec("torch") is not None
    if ROOT:
        locked = pins(ROOT / ("requirements.lock" if has_torch else "requirements-light.lock"))
        yield packages(locked, _installed(), pins(ROOT / "requirements-dev.lock"))
    else:
        yield ok("packages", "not compared: the lock files are in a clone, and this is an installed package")
    yield (
        torch()
        if has_torch
        else ok("torch", "not installed: this machine plans and submits, and does not train")
    )
    if here := this_machine.row():
        yield gpus(here)
    yield free("disk", shutil.disk_usage(Path.cwd()).free, DISK_GIB)
    if memory := _available_memory():
        yield free("memory", memory, MEMORY_GIB)
    yield temporary(Path(tempfile.gettempdir()))
    yield hub_token(_token())
    yield hub(os.environ.get("HF_HUB_OFFLINE", ""), os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    yield docker()
    yield vllm(Path(VLLM))
    yield from files(ROOT / "recipes") if ROOT else hardware_files()


def python(version: tuple[int, int]) -> Finding:
    """Check the version of the interpreter."""
    running = ".".join(map(str, version))
    if version in PYTHONS:
        return ok(
            "python",
            running
            if version < _WITHOUT_FLYTEKIT
            else f"{running}: plans and reads; flytekit, for runs, needs 3.12",
        )
    supported = f"{PYTHONS[0][0]}.{PYTHONS[0][1]} to {PYTHONS[-1][0]}.{PYTHONS[-1][1]}"
    do = "create .venv again: `rm -r .venv; make install PYTHON=python3.11`"
    return fail("python", f"{running}; Flytune runs on {supported}", do)


def pins(lock: Path) -> dict[str, str]:
    """Return the versions in a lock file by name; none if there is no such file (in a pod)."""
    if not lock.is_file():
        return {}
    return dict(
        re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==([^\s;+]+)", lock.read_text(encoding="utf-8"), re.MULTILINE)
    )


def packages(
    locked: Mapping[str, str],
    installed: Mapping[str, str],
    also_locked: Mapping[str, str] = MappingProxyType({}),
) -> Finding:
    """Compare the installed versions with the lock file; local parts (+cpu) are ignored.

    `also_locked` are the pins of the lock that `make install` takes, which has the tools of development as
    well: some of them ask for another version of a package.
    """
    versions = {_normalized(name): version.partition("+")[0] for name, version in installed.items()}
    versions_here = {name: versions.get(_normalized(name)) for name in locked}
    wrong = [
        f"{name} {versions_here[name]} (lock: {pin})"
        for name, pin in locked.items()
        if versions_here[name] not in (None, pin, also_locked.get(name))
    ]
    missing = [name for name in locked if versions_here[name] is None]
    if not wrong and not missing:
        return ok("packages", f"{counted(len(locked), 'package')} in the locked versions")
    differing = ", ".join([*wrong[:4], *([f"missing: {', '.join(missing[:4])}"] if missing else [])])
    more = max(0, len(wrong) - 4) + max(0, len(missing) - 4)
    return warn(
        "packages",
        differing + (f" and {more} more" if more else ""),
        "`make install` installs the locked versions",
    )


def torch() -> Finding:
    """Check that torch computes, and list its devices."""
    try:
        import torch

        torch.ones(2).sum().item()
        devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    except (ImportError, OSError, RuntimeError) as error:
        return fail("torch", f"cannot be used: {_line(error)}", "`make install` installs the locked version")
    return ok("torch", f"{torch.__version__}, on {', '.join(devices) or 'the CPU'}")


def gpus(here: Shape) -> Finding:
    """Check that a row of shapes.yaml has this machine's GPUs."""
    seen = f"{here.processes} x {here.accelerator} with {here.gpu_memory_gib:g} GiB"
    rows = [shape.name for shape in _shapes() if this_machine.has(here, shape)]
    if rows:
        return ok("gpus", f"{seen}: hardware.shape: {' or '.join(rows)}")
    fields = here.model_dump(mode="json", exclude_defaults=True) | {"price_per_hour": 0.0}
    line = yaml_core.dump(fields, in_one_line=True)
    do = f"for runs on this machine add to {SHAPES_FILE.name}, with what an hour of it costs: - {line}"
    return warn("gpus", f"{seen}: no row of {SHAPES_FILE.name} is such a machine", do)


def _shapes() -> Sequence[Shape]:
    try:
        return load_shapes()
    except RecipeError:  # a finding of its own
        return ()


def free(what: str, size: float, enough_gib: float) -> Finding:
    """Check the free bytes."""
    shown = f"{size / GIB:.1f} GiB free"
    if size >= enough_gib * GIB:
        return ok(what, shown)
    return warn(
        what,
        f"{shown}; the demo needs {enough_gib} GiB",
        "free some; `flytune plan RECIPE` shows the needs of a run",
    )


def temporary(folder: Path) -> Finding:
    """Check the folder in which local runs of Flyte store the outputs of tasks."""
    what = "temporary directory"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
        size = shutil.disk_usage(folder).free
    except OSError as error:
        return fail(what, f"{folder}: cannot be written: {error.strerror}", "set TMPDIR to a writable folder")
    shown = f"{folder}: {size / GIB:.1f} GiB free"
    if size >= TEMPORARY_GIB * GIB:
        return ok(what, shown)
    return warn(what, f"{shown}; runs on this machine store models there", "set TMPDIR to a larger disk")


def hub_token(token: str | None) -> Finding:
    """Check that there is a token, without showing it."""
    if token:
        return ok("hub token", "found (not shown)")
    return ok("hub token", "none; gated models require one: `hf auth login`, or HF_TOKEN")


def hub(offline: str, address: str) -> Finding:
    """Check that the hub answers, unless HF_HUB_OFFLINE is set."""
    if offline.lower() in ("1", "true", "yes", "on"):
        return ok("hub", "not used, because HF_HUB_OFFLINE is set; models are read from folders or the cache")
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_SECONDS):
            return ok("hub", f"{address} answers")
    except urllib.error.HTTPError:
        return ok("hub", f"{address} answers")
    except (OSError, ValueError) as error:
        do = (
            "models on the hub cannot be read; if this is intended, set HF_HUB_OFFLINE=1, else set "
            "HF_ENDPOINT to a mirror"
        )
        return warn("hub", f"{address} does not answer: {_line(error)}", do)


def vllm(python: Path) -> Finding:
    """Look for vLLM in the environment that recipes with objective.engine: vllm use by default."""
    folders = python.parent.parent.glob("lib/python*/site-packages/vllm*.dist-info")
    names = sorted(folder.name.removesuffix(".dist-info") for folder in folders)
    if python.is_file() and names:
        return ok("vllm", f"{names[0].replace('-', ' ')}, by {python}")
    return ok("vllm", f"no {python}; objective.engine: vllm needs it, or another objective.engine.python")


def docker() -> Finding:
    """Check docker, which builds images from the Dockerfile or for flytekit's ImageSpec."""
    do = "start docker, or build the images elsewhere; runs on this machine do not need images"
    if not (program := shutil.which("docker")):
        return warn("docker", "not installed; images cannot be built here", do)
    try:
        command = [program, "info", "--format", "{{.ServerVersion}}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return warn("docker", f"does not answer: {_line(error)}", do)
    if done.returncode or not done.stdout.strip():
        return warn("docker", "installed, but its engine does not answer", do)
    return ok("docker", f"{done.stdout.strip()}; images can be built here")


def files(recipes: Path) -> Iterator[Finding]:
    """Check that the files that users edit can be read."""
    yield from hardware_files()
    yield _read(
        "recipes",
        lambda: f"{len([read_recipe(path) for path in sorted(recipes.glob('*.yaml'))])} recipes are valid",
    )


def hardware_files() -> Iterator[Finding]:
    """Check shapes.yaml and cluster.yaml."""
    yield _read(SHAPES_FILE.name, lambda: counted(len(load_shapes()), "shape"))
    yield _read(CLUSTER_FILE.name, _cluster)


def _cluster() -> str:
    cluster = load_cluster()
    cluster.check_shapes({shape.name for shape in load_shapes()})
    names = ", ".join(volume.name for volume in cluster.volumes) or "none"
    return f"gang scheduling: {cluster.gang_scheduling}; volumes: {names}"


def _read(what: str, read: Callable[[], str]) -> Finding:
    try:
        return ok(what, read())
    except RecipeError as error:
        return fail(what, _line(error), "correct it; `flytune plan` checks one recipe")


def _installed() -> dict[str, str]:
    return {distribution.name: distribution.version for distribution in metadata.distributions()}


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _available_memory() -> int | None:
    """Return the available memory in bytes; None if unknown (not on Linux)."""
    file = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s+(\d+) kB", file.read_text()) if file.exists() else None
    return int(match[1]) * 1024 if match else None


def _token() -> str | None:
    if importlib.util.find_spec("huggingface_hub") is None:
        return os.environ.get("HF_TOKEN")
    from huggingface_hub import get_token

    return get_token()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
