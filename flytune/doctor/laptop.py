"""Whether this machine can plan, submit and run."""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from sys import version_info

from flytune.doctor.finding import Finding, fail, ok, warn
from flytune.errors import RecipeError
from flytune.hardware.cluster import CLUSTER_FILE, load_cluster
from flytune.hardware.shapes import GIB, SHAPES_FILE, load_shapes
from flytune.recipe.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHONS = ((3, 11), (3, 12))
"""As pyproject.toml has them."""
DISK_GIB, MEMORY_GIB, TEMPORARY_GIB = 10, 6, 4
"""Free, for the demo: the environment and its small models; a run of your own may want more, which its plan says."""
_SECONDS = 5.0


def findings() -> Iterator[Finding]:
    """All that can be said of this machine."""
    yield python((version_info.major, version_info.minor))
    has_torch = importlib.util.find_spec("torch") is not None
    yield packages(pins(ROOT / ("requirements.lock" if has_torch else "requirements-light.lock")), _installed())
    yield torch() if has_torch else ok("torch", "not installed: this machine plans and submits, and does not train")
    yield free("disk", shutil.disk_usage(Path.cwd()).free, DISK_GIB)
    if memory := _available_memory():
        yield free("memory", memory, MEMORY_GIB)
    yield temporary(Path(tempfile.gettempdir()))
    yield hub_token(_token())
    yield hub(os.environ.get("HF_HUB_OFFLINE", ""), os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    yield docker()
    yield from files(ROOT / "recipes")


def python(version: tuple[int, int]) -> Finding:
    """Of the interpreter."""
    said = ".".join(map(str, version))
    if version in PYTHONS:
        return ok("python", said)
    known = " and ".join(".".join(map(str, one)) for one in PYTHONS)
    return fail("python", f"{said}; Flytune runs on {known}", "make .venv anew: `rm -r .venv; make install PYTHON=python3.11`")


def pins(lock: Path) -> dict[str, str]:
    """Names and versions of a lock; none where there is no such file (an installed package)."""
    if not lock.is_file():
        return {}
    return dict(re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==([^\s;+]+)", lock.read_text(encoding="utf-8"), re.MULTILINE))


def packages(locked: Mapping[str, str], installed: Mapping[str, str]) -> Finding:
    """The installed versions against the lock's; local parts (+cpu) do not count."""
    have = {_plain(name): version.partition("+")[0] for name, version in installed.items()}
    wrong = [f"{name} {have[_plain(name)]} (lock: {pin})" for name, pin in locked.items() if have.get(_plain(name), pin) != pin]
    missing = [name for name in locked if _plain(name) not in have]
    if not wrong and not missing:
        return ok("packages", f"{len(locked)} as the lock has them")
    said = ", ".join([*wrong[:4], *([f"missing: {', '.join(missing[:4])}"] if missing else [])])
    more = max(0, len(wrong) - 4) + max(0, len(missing) - 4)
    return warn("packages", said + (f" and {more} more" if more else ""), "`make install` installs the lock")


def torch() -> Finding:
    """Whether it computes, and on what."""
    try:
        import torch

        torch.ones(2).sum().item()
        devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    except (ImportError, OSError, RuntimeError) as error:
        return fail("torch", f"cannot be used: {_line(error)}", "`make install` installs the locked one")
    return ok("torch", f"{torch.__version__}, on {', '.join(devices) or 'the CPU'}")


def free(what: str, found: float, enough_gib: float) -> Finding:
    """Bytes that are free."""
    said = f"{found / GIB:.1f} GiB free"
    if found >= enough_gib * GIB:
        return ok(what, said)
    return warn(what, f"{said}; the demo wants {enough_gib}", "free some; `flytune plan RECIPE` says what a run needs")


def temporary(folder: Path) -> Finding:
    """Where local runs of Flyte keep everything that tasks hand on."""
    what = "temporary directory"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
        found = shutil.disk_usage(folder).free
    except OSError as error:
        return fail(what, f"{folder}: cannot be written: {error.strerror}", "set TMPDIR to a folder that can")
    said = f"{folder}: {found / GIB:.1f} GiB free"
    if found >= TEMPORARY_GIB * GIB:
        return ok(what, said)
    return warn(what, f"{said}; runs on this machine keep models there", "set TMPDIR to a larger disk")


def hub_token(token: str | None) -> Finding:
    """Only whether there is one."""
    if token:
        return ok("hub token", "there is one (not shown)")
    return ok("hub token", "none; gated models need one: `hf auth login`, or HF_TOKEN")


def hub(offline: str, address: str) -> Finding:
    """Whether it answers, or is not to be asked."""
    if offline.lower() in ("1", "true", "yes", "on"):
        return ok("hub", "offline, as HF_HUB_OFFLINE says; models come from folders or the cache")
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_SECONDS):
            return ok("hub", f"{address} answers")
    except urllib.error.HTTPError:
        return ok("hub", f"{address} answers")
    except (OSError, ValueError) as error:
        told = "nothing of the hub can be read here; set HF_HUB_OFFLINE=1 if that is meant, or HF_ENDPOINT to a mirror"
        return warn("hub", f"{address} does not answer: {_line(error)}", told)


def docker() -> Finding:
    """What builds images here, from the Dockerfile or for flytekit's ImageSpec."""
    do = "start docker, or build the images elsewhere; running on this machine needs none"
    if not (program := shutil.which("docker")):
        return warn("docker", "not installed: images cannot be built here", do)
    try:
        asked = [program, "info", "--format", "{{.ServerVersion}}"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return warn("docker", f"does not answer: {_line(error)}", do)
    if done.returncode or not done.stdout.strip():
        return warn("docker", "installed, but its engine does not answer", do)
    return ok("docker", f"{done.stdout.strip()}; images can be built here")


def files(recipes: Path) -> Iterator[Finding]:
    """The files that people edit are read as a run would read them."""
    for what, read in (
        (SHAPES_FILE.name, lambda: f"{len(load_shapes())} shapes"),
        (CLUSTER_FILE.name, lambda: f"gang scheduling: {load_cluster().gang_scheduling}"),
        ("recipes", lambda: f"{len([Recipe.from_yaml(path) for path in sorted(recipes.glob('*.yaml'))])} can be read"),
    ):
        yield _read(what, read)


def _read(what: str, read: Callable[[], str]) -> Finding:
    try:
        return ok(what, read())
    except RecipeError as error:
        return fail(what, _line(error), "mend it; `flytune plan` checks one recipe")


def _installed() -> dict[str, str]:
    return {found.name: found.version for found in metadata.distributions()}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _available_memory() -> int | None:
    """In bytes; None where the system does not say (not Linux)."""
    file = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", file.read_text()) if file.exists() else None
    return int(found[1]) * 1024 if found else None


def _token() -> str | None:
    if importlib.util.find_spec("huggingface_hub") is None:
        return os.environ.get("HF_TOKEN")
    from huggingface_hub import get_token

    return get_token()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
