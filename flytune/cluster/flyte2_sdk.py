"""Flyte 2's control plane through its SDK: which configuration names it, and what it says of a run."""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flytune import patches, yaml_core
from flytune.cluster.executions import Execution
from flytune.errors import ExportError, chain

_SECTIONS = {"task", "image", "local"}
"""Sections of Flyte 2's configuration that Flyte 1's has not; both have `admin`."""
INSTALL = "pip install 'flytune[flyte2]'"


def config_file() -> Path | None:
    """Return the configuration that the SDK finds first, if it is one of Flyte 2; else None."""
    candidates = [Path("config.yaml"), Path(".flyte/config.yaml")]
    candidates += [root / ".flyte/config.yaml" for root in Path.cwd().parents if (root / ".git").exists()]
    candidates += [
        Path(named) for name in ("UCTL_CONFIG", "FLYTECTL_CONFIG") if (named := os.environ.get(name))
    ]
    for file in (*candidates, Path.home() / ".union/config.yaml", Path.home() / ".flyte/config.yaml"):
        sections = content(file)
        if isinstance(sections.get("admin"), Mapping):
            return file if _SECTIONS & set(sections) else None
    return None


def scope(config: Path) -> tuple[str, str]:
    """Return the project and the domain that a configuration names, or Flyte's own."""
    task = content(config).get("task")
    named = task if isinstance(task, Mapping) else {}
    return str(named.get("project", "flytesnacks")), str(named.get("domain", "development"))


def content(file: Path) -> Mapping[str, Any]:
    """Return the content of a configuration; nothing of one that cannot be read."""
    try:
        sections = yaml_core.load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml_core.YAMLError):
        return {}
    return sections if isinstance(sections, Mapping) else {}


@contextmanager
def connected(config: Path, run: Execution) -> Iterator[None]:
    """Use the SDK in the block; its errors are an ExportError about the run.

    Raises:
        ExportError: the SDK is not installed, or the control plane does not know the run or does not answer.
    """
    if importlib.util.find_spec("flyte") is None:
        raise ExportError(f"{run.name}: {config} names Flyte 2, whose SDK is not installed: {INSTALL}")
    try:
        with configured(config, run.project, run.domain):
            yield
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(f"{run}: Flyte 2: {line(error)}; {advice(error)}") from error


@contextmanager
def configured(config: Path, project: str, domain: str) -> Iterator[None]:
    """Configure the SDK in the block. It replaces fsspec's file systems, which are back afterwards."""
    implementations = dict(patches.fsspec.IMPLEMENTATIONS.current())
    with (
        patches.fsspec.IMPLEMENTATIONS.replaced(implementations),
        patches.fsspec.REGISTRY.replaced(MappingProxyType(implementations)),
    ):
        os.environ.setdefault("FLYTE_DISABLE_TELEMETRY", "1")
        import flyte

        flyte.init_from_config(config, project=project, domain=domain)
        yield


def _root(error: BaseException) -> BaseException:
    return [*chain(error, contexts="none")][-1]


def line(error: BaseException) -> str:
    """Return the root cause of an error of the SDK on one line."""
    cause = _root(error)
    code = getattr(getattr(cause, "code", None), "name", "")
    return f"{code}: {cause}"[:300] if code else " ".join(str(cause).split())[:300] or type(cause).__name__


def advice(error: BaseException) -> str:
    """Return what to do about an error of the SDK."""
    by_code: dict[str, str] = {
        "UNAUTHENTICATED": "log in: `flyte get project` asks for it; or mend admin.authType",
        "PERMISSION_DENIED": "ask for access to the project",
        "NOT_FOUND": "give --project and --domain",
    }
    return by_code.get(
        getattr(getattr(_root(error), "code", None), "name", ""),
        "check admin.endpoint, admin.insecure, and that it runs",
    )
