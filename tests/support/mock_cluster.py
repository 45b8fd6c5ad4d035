"""Mocks of a cluster's services: flyteadmin on flyteidl's servicer, and Kubernetes' API as JSON over HTTP."""

import json
import threading
from concurrent import futures
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

import grpc
from flyteidl.admin import common_pb2, project_pb2, task_pb2, version_pb2
from flyteidl.core import identifier_pb2
from flyteidl.service import admin_pb2_grpc, dataproxy_pb2, dataproxy_pb2_grpc

from tests.support.json_server import JsonHandler


class _Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, projects, domains, tasks):
        self.projects, self.domains, self.tasks = projects, domains, tasks

    def GetVersion(self, request, context):
        return version_pb2.GetVersionResponse(control_plane_version=version_pb2.Version(Version="v1.16.0"))

    def ListProjects(self, request, context):
        domains = [project_pb2.Domain(id=name, name=name) for name in self.domains]
        made = [project_pb2.Project(id=name, name=name, domains=domains) for name in self.projects]
        return project_pb2.Projects(projects=made)

    def ListTasks(self, request, context):
        if request.id.name not in self.tasks:
            return task_pb2.TaskList()
        found = {
            "project": request.id.project,
            "domain": request.id.domain,
            "name": request.id.name,
            "version": "v7",
        }
        return task_pb2.TaskList(
            tasks=[task_pb2.Task(id=identifier_pb2.Identifier(resource_type=1, **found))]
        )

    def ListTaskIds(self, request, context):
        made = [common_pb2.NamedEntityIdentifier(project="p", domain="d", name=name) for name in self.tasks]
        return common_pb2.NamedEntityIdentifierList(entities=made)


class _DataProxy(dataproxy_pb2_grpc.DataProxyServiceServicer):
    def __init__(self, storage):
        self.storage = storage

    def CreateUploadLocation(self, request, context):
        if not self.storage:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "no signer")
        place = {
            "signed_url": f"{self.storage}/{request.filename}",
            "native_url": f"s3://bucket/{request.filename}",
        }
        return dataproxy_pb2.CreateUploadLocationResponse(**place)


@contextmanager
def flyteadmin(projects, domains, tasks=(), storage=""):
    """Serve a mock flyteadmin; yield its endpoint.

    Args:
        tasks: names that are registered as v7.
        storage: address of uploads.
    """
    server = grpc.server(futures.ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(_Admin(projects, domains, tasks), server)
    dataproxy_pb2_grpc.add_DataProxyServiceServicer_to_server(_DataProxy(storage), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def http(answers, kept=None, asked=None):
    """Serve GET from `answers` (path: JSON, a text, or a status), and store the content of PUT in `kept`;
    yield the address.

    POST is answered by the function at "POST path", and its content noted in `asked`.
    """

    class Handler(JsonHandler):
        def do_GET(self):
            answer = answers.get(self.path.partition("?")[0], 404)
            status, body = (answer, {"kind": "Status"}) if isinstance(answer, int) else (200, answer)
            if isinstance(body, str):
                self._send(status, body.encode(), {"Content-Type": "text/plain"})
            else:
                self._send(status, body)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(("POST", body))
            self._send(201, answers[f"POST {self.path.partition('?')[0]}"](dict(body)))

        def do_PUT(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if kept is not None:
                kept[self.path] = (body, dict(self.headers))
            self._send(200 if kept is not None else 403, b"")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
