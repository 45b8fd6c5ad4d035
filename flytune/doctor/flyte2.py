"""Checks of Flyte 2's control plane, through its SDK."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from flytune.cluster import flyte2_sdk
from flytune.doctor import storage
from flytune.doctor.finding import Finding, fail, ok
from flytune.hardware import SecretKey

_SECONDS = 10.0


def findings(
    config: Path, project: str, domain: str, only_reach: bool = False, secrets: Sequence[SecretKey] = ()
) -> Iterator[Finding]:
    """Check the control plane, the project, the storage and the secrets; stop after a failure that prevents
    further checks."""
    if importlib.util.find_spec("flyte") is None:
        yield fail("flyte config", f"{config}: Flyte 2, whose SDK is not installed", flyte2_sdk.INSTALL)
        return
    yield ok(
        "flyte config", f"{config}: Flyte 2, {flyte2_sdk.content(config).get('admin', {}).get('endpoint')}"
    )
    # Retries, and a login in a browser, are without an end.
    collected: list[Finding] = []

    def check() -> None:
        collected.extend(_findings(config, project, domain, only_reach, secrets))

    thread = Thread(target=check, daemon=True)
    thread.start()
    thread.join(_SECONDS * 2)
    yield from list(collected)
    if thread.is_alive():
        do = "check admin.endpoint, and that it runs; where a login is needed, log in by `flyte get project`"
        yield fail("control plane", f"did not answer in {2 * _SECONDS:.0f} s", do)


def _findings(
    config: Path, project: str, domain: str, only_reach: bool, secrets: Sequence[SecretKey]
) -> Iterator[Finding]:
    from flyte.remote import Project

    try:
        with flyte2_sdk.configured(config, project, domain):
            known = {
                project_there.pb2.id: [entry.id for entry in project_there.pb2.domains]
                for project_there in Project.listall()
            }
            yield ok("control plane", "answers")
            if only_reach:
                return
            if project not in known:
                yield fail(
                    "project",
                    f"{project} does not exist",
                    f"set PROJECT to one of {', '.join(sorted(known))}",
                )
                return
            if domain not in known[project]:
                do = f"set DOMAIN to one of {', '.join(known[project])}"
                yield fail("project", f"{project} has no domain {domain}", do)
                return
            yield ok("project", f"{project}, domain {domain}")
            yield _storage(project, domain)
            yield from _secrets(secrets)
    except Exception as error:  # noqa: BLE001 (the SDK and its libraries have many)
        yield fail("control plane", flyte2_sdk.line(error), flyte2_sdk.advice(error))


def _secrets(secrets: Sequence[SecretKey]) -> Iterator[Finding]:
    """Check that Flyte 2 has the secrets of cluster.yaml, which it finds by their keys; it reads none of
    Kubernetes' own."""
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
