"""Flyte 2's control plane through its SDK: which configuration names it, checks of it, and what a run has made."""

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

from flytune import patches, yaml_core
from flytune.doctor import storage
from flytune.doctor.finding import Finding, fail, ok
from flytune.errors import ExportError, chain
from flytune.hardware import SecretKey

_SECONDS = 10.0
_SECTIONS = {"task", "image", "local"}
"""Sections of Flyte 2's configuration that Flyte 1's has not; both have `admin`."""
INSTALL = "pip install 'flytune[flyte2]'"


def config_file() -> Path | None:
    """Return the configuration that the SDK finds first, if it is one of Flyte 2; else None."""
    own = [Path("config.yaml"), Path(".flyte/config.yaml")]
    own += [root / ".flyte/config.yaml" for root in Path.cwd().parents if (root / ".git").exists()]
    own += [Path(named) for name in ("UCTL_CONFIG", "FLYTECTL_CONFIG") if (named := os.environ.get(name))]
    for file in (*own, Path.home() / ".union/config.yaml", Path.home() / ".flyte/config.yaml"):
        content = _content(file)
        if isinstance(content.get("admin"), Mapping):
            return file if _SECTIONS & set(content) else None
    return None


def scope(config: Path) -> tuple[str, str]:
    """Return the project and the domain that a configuration names, or Flyte's own."""
    task = _content(config).get("task")
    named = task if isinstance(task, Mapping) else {}
    return str(named.get("project", "flytesnacks")), str(named.get("domain", "development"))


def _content(file: Path) -> Mapping[str, Any]:
    try:
        content = yaml_core.load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml_core.YAMLError):
        return {}
    return content if isinstance(content, Mapping) else {}


def findings(
    config: Path, project: str, domain: str, only_reach: bool = False, secrets: Sequence[SecretKey] = ()
) -> Iterator[Finding]:
    """Check the control plane, the project, the storage and the secrets; stop after a failure that prevents further checks."""
    if importlib.util.find_spec("flyte") is None:
        yield fail("flyte config", f"{config}: Flyte 2, whose SDK is not installed", INSTALL)
        return
    yield ok("flyte config", f"{config}: Flyte 2, {_content(config).get('admin', {}).get('endpoint')}")
    # Retries, and a login in a browser, are without an end.
    made: list[Finding] = []

    def check() -> None:
        made.extend(_findings(config, project, domain, only_reach, secrets))

    thread = Thread(target=check, daemon=True)
    thread.start()
    thread.join(_SECONDS * 2)
    yield from list(made)
    if thread.is_alive():
        do = "check admin.endpoint, and that it runs; where a login is needed, log in by `flyte get project`"
        yield fail("control plane", f"did not answer in {2 * _SECONDS:.0f} s", do)


def _findings(config: Path, project: str, domain: str, only_reach: bool, secrets: Sequence[SecretKey]) -> Iterator[Finding]:
    from flyte.remote import Project

    try:
        with _sdk(config, project, domain):
            known = {one.pb2.id: [of.id for of in one.pb2.domains] for one in Project.listall()}
            yield ok("control plane", "answers")
            if only_reach:
                return
            if project not in known:
                yield fail("project", f"{project} does not exist", f"set PROJECT to one of {', '.join(sorted(known))}")
                return
            if domain not in known[project]:
                do = f"set DOMAIN to one of {', '.join(known[project])}"
                yield fail("project", f"{project} has no domain {domain}", do)
                return
            yield ok("project", f"{project}, domain {domain}")
            yield _storage(project, domain)
            yield from _secrets(secrets)
    except Exception as error:  # noqa: BLE001 (the SDK and its libraries have many)
        yield fail("control plane", _line(error), _advice(error))


def _secrets(secrets: Sequence[SecretKey]) -> Iterator[Finding]:
    """Check that Flyte 2 has the secrets of cluster.yaml, which it finds by their keys; it reads none of Kubernetes' own."""
    if not secrets:
        return
    from flyte.remote import Secret

    known = {secret.name for secret in Secret.listall()}
    for secret in secrets:
        what = f"secret for {secret.env_var}"
        if secret.key in known:
            yield ok(what, f"{secret.key} (value not shown)")
        else:
            do = f"`flyte create secret {secret.key}`; a pod that asks for it is not started without"
            yield fail(what, f"Flyte 2 has no secret {secret.key}", do)


def _storage(project: str, domain: str) -> Finding:
    from flyte._initialize import get_client
    from flyte.syncify import syncify
    from flyteidl2.dataproxy.dataproxy_service_pb2 import CreateUploadLocationRequest

    request = CreateUploadLocationRequest(
        project=project,
        domain=domain,
        content_md5=storage.MD5,
        filename=storage.NAME,
        content_length=len(storage.CONTENT),
    )

    @syncify
    async def location() -> Any:
        return await get_client().dataproxy_service.create_upload_location(request)

    return storage.upload(location(), "the data proxy")


@contextmanager
def connected(config: Path, project: str, domain: str, run: str) -> Iterator[None]:
    """Use the SDK in the block; its errors are an ExportError about the run.

    Raises:
        ExportError: the SDK is not installed, or the control plane does not know the run or does not answer.
    """
    if importlib.util.find_spec("flyte") is None:
        raise ExportError(f"{run}: {config} names Flyte 2, whose SDK is not installed: {INSTALL}")
    try:
        with _sdk(config, project, domain):
            yield
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(f"{run} in {project}-{domain}: Flyte 2: {_line(error)}; {_advice(error)}") from error


@contextmanager
def _sdk(config: Path, project: str, domain: str) -> Iterator[None]:
    """Configure the SDK in the block. It replaces fsspec's file systems, which are back afterwards."""
    own = dict(patches.fsspec.IMPLEMENTATIONS.current())
    with patches.fsspec.IMPLEMENTATIONS.replaced(own), patches.fsspec.REGISTRY.replaced(MappingProxyType(own)):
        os.environ.setdefault("FLYTE_DISABLE_TELEMETRY", "1")
        import flyte

        flyte.init_from_config(config, project=project, domain=domain)
        yield


def _root(error: BaseException) -> BaseException:
    return [*chain(error, contexts="none")][-1]


def _line(error: BaseException) -> str:
    """Return the root cause of an error of the SDK on one line."""
    cause = _root(error)
    code = getattr(getattr(cause, "code", None), "name", "")
    return f"{code}: {cause}"[:300] if code else " ".join(str(cause).split())[:300] or type(cause).__name__


def _advice(error: BaseException) -> str:
    by_code: dict[str, str] = {
        "UNAUTHENTICATED": "log in: `flyte get project` asks for it; or mend admin.authType",
        "PERMISSION_DENIED": "ask for access to the project",
        "NOT_FOUND": "give --project and --domain",
    }
    return by_code.get(
        getattr(getattr(_root(error), "code", None), "name", ""), "check admin.endpoint, admin.insecure, and that it runs"
    )
