"""Checks of Flyte's admin, through flytekit."""

import importlib.util
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

from flytune.cluster.control_plane import NO_CLUSTER, certificates, client_of, errors, line, platform_of
from flytune.doctor import storage
from flytune.doctor.finding import Finding, fail, ok, warn
from flytune.hardware import load_shapes

PORT = 443
"""Default port of an endpoint."""
_SECONDS = 10.0
_PLAN = "tasks.plan.make_plan"
_CHECK_CONFIG = "check the config's endpoint, admin.insecure and authType; then admin's log"


def local(config: Path | None) -> Iterator[Finding]:
    """Check the parts of Flyte that runs on this machine use."""
    yield ok("flyte config", str(config) if config else "none; runs stay on this machine")
    if importlib.util.find_spec("union") is not None and config is None:
        yield fail(
            "union",
            "installed without a config; this breaks `pyflyte run` on this machine",
            "`pip uninstall union`",
        )


def findings(config: Path | None, project: str, domain: str, only_reach: bool = False) -> Iterator[Finding]:
    """Check admin, project and domain, registered tasks, and storage; stop after a failure that prevents
    further checks."""
    from flytekit.configuration.file import get_config_file
    from flytekit.configuration.internal import Platform

    named = os.environ.get("FLYTECTL_CONFIG")
    if named and not Path(named).exists():
        yield fail(
            "flyte config", f"FLYTECTL_CONFIG names {named}, which does not exist and is ignored", NO_CLUSTER
        )
        return
    if (platform := platform_of(config)) is None:
        yield fail("flyte config", "none; no cluster is configured", NO_CLUSTER)
        return
    if config and not Platform.URL.read(get_config_file(str(config))):
        problem = (
            f"{config}: no admin.endpoint can be read there, so that pyflyte would ask {platform.endpoint}"
        )
        yield fail(
            "flyte config",
            problem,
            "`flytectl config init --host=HOST`, or write `admin: {endpoint: dns:///HOST}`",
        )
        return
    yield ok("flyte config", f"{config or 'the environment'}: {platform.endpoint}")
    reached = _unreachable(platform.endpoint) or _version(platform)
    yield reached
    if reached.level == "OK" and not only_reach:
        client = client_of(platform, retries=False)
        yield _guarded("project", lambda: _project(client, project, domain))
        yield _guarded("registered", lambda: _registered(client, project, domain))
        yield _guarded("storage", lambda: _storage(client, platform, project, domain))


def _unreachable(endpoint: str) -> Finding | None:
    """Return a finding if nothing listens at the endpoint."""
    host, _, port = endpoint.rpartition("://")[2].removeprefix("/").partition(":")
    try:
        socket.create_connection((host, int(port or PORT)), timeout=_SECONDS).close()
    except (OSError, ValueError) as error:
        do = f"check that it runs; without a cluster: {NO_CLUSTER}"
        return fail("admin", f"{endpoint} does not answer: {line(error)}", do)
    return None


def _version(platform: Any) -> Finding:
    """Return admin's version, with a timeout: flytekit's calls have none, and never return if the server is
    not admin."""
    results: list[Finding] = []

    def version() -> Finding:
        return ok(
            "admin",
            f"answers, version {client_of(platform, retries=False).get_control_plane_version() or 'unknown'}",
        )

    thread = Thread(target=lambda: results.append(_guarded("admin", version)), daemon=True)
    thread.start()
    thread.join(_SECONDS)
    do = (
        "check that the endpoint is Flyte's gRPC endpoint, and admin.insecure; to log in, use `pyflyte run "
        "--remote`"
    )
    return (
        results[0]
        if results
        else fail("admin", f"{platform.endpoint} did not return its version in {_SECONDS:.0f} s", do)
    )


def _guarded(what: str, check: Callable[[], Finding]) -> Finding:
    """Run a check; return errors of flytekit, gRPC and the network as findings."""
    failures: tuple[type[Exception], ...] = (*errors(), OSError)  # errors of requests are OSErrors
    try:
        return check()
    except failures as error:
        return fail(what, line(error), _CHECK_CONFIG)


def _project(client: Any, project: str, domain: str) -> Finding:
    from flyteidl.admin.project_pb2 import ProjectListRequest

    projects, token = dict[str, list[str]](), ""
    while True:
        # flytekit's own models omit the domains.
        page = client.list_projects(ProjectListRequest(limit=100, token=token))
        projects |= {project.id: [domain.id for domain in project.domains] for project in page.projects}
        if not (token := page.token):
            break
    if project not in projects:
        known = ", ".join(sorted(projects))
        do = f"`flytectl create project --id {project} --name {project}`, or set PROJECT to one of {known}"
        return fail("project", f"{project} does not exist", do)
    if domain not in projects[project]:
        return fail(
            "project",
            f"{project} has no domain {domain}",
            f"set DOMAIN to one of {', '.join(projects[project])}",
        )
    return ok("project", f"{project}, domain {domain}")


def _registered(client: Any, project: str, domain: str) -> Finding:
    from flytekit.models.admin.common import Sort
    from flytekit.models.common import NamedEntityIdentifier

    newest = Sort("created_at", Sort.Direction.DESCENDING)
    tasks, _ = client.list_tasks_paginated(
        NamedEntityIdentifier(project, domain, _PLAN), limit=1, sort_by=newest
    )
    if not tasks:
        return warn(
            "registered",
            "no tasks of Flytune yet",
            "`make register`; `make remote` registers the tasks that it runs",
        )
    names = set[str]()
    page, token = client.list_task_ids_paginated(project, domain, limit=1000)
    names |= {workflow.name for workflow in page}
    while token:
        page, token = client.list_task_ids_paginated(project, domain, limit=1000, token=token)
        names |= {workflow.name for workflow in page}
    version = tasks[0].id.version
    missing = [
        shape.name
        for shape in load_shapes()
        if f"tasks.evaluate.evaluate_model_{shape.identifier}" not in names
    ]
    if missing:
        return warn(
            "registered", f"version {version}, without shapes {', '.join(missing)}", "`make register`"
        )
    return ok("registered", f"version {version}, with every shape")


def _storage(client: Any, platform: Any, project: str, domain: str) -> Finding:
    place = client.get_upload_signed_url(
        project=project, domain=domain, content_md5=storage.MD5, filename=storage.NAME
    )
    return storage.upload(place, "admin", certificates(platform))
