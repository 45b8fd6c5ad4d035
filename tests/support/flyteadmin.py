"""Mock of Flyte's control plane: flyteidl's gRPC services, which store what pyflyte sends; storage is moto's
S3.

It starts nothing: tests/support/propeller.py runs registered workflows.
"""

import base64
import hashlib
import re
import threading
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
from flyteidl.admin import (
    execution_pb2,
    launch_plan_pb2,
    node_execution_pb2,
    project_pb2,
    task_execution_pb2,
    task_pb2,
    version_pb2,
    workflow_pb2,
)
from flyteidl.core import identifier_pb2, literals_pb2
from flyteidl.service import admin_pb2_grpc, dataproxy_pb2, dataproxy_pb2_grpc

from tests.support import compiler
from tests.support.s3 import ObservedS3, served

BUCKET = "flyte"
SUCCEEDED, FAILED, ABORTED = 4, 6, 7
"""Phases of executions."""
PAGE = 3
"""Number of nodes on a page of a list; flyteadmin uses the caller's limit."""


class Admin(admin_pb2_grpc.AdminServiceServicer, dataproxy_pb2_grpc.DataProxyServiceServicer):
    """Mock admin with registered entities by name, executions, and addresses of uploads."""

    def __init__(self, s3):
        self._s3 = s3
        self.tasks, self.workflows, self.launch_plans, self.executions = {}, {}, {}, {}
        self.nodes, self.phases = {}, {}
        self.outputs, self.errors = {}, {}
        """Outputs of executions that have succeeded, and messages of others, by name."""
        self.cache = {}
        """Outputs of cached tasks by key (execution.py)."""
        self.uploads = []
        self.active = []
        self.uploads_end = threading.Event()
        """Cleared by a test that holds the writes of pods' raw data: none ends before it is set."""
        self.uploads_end.set()
        self.arriving = []
        """Keys of writes in progress."""
        self.looks = 0
        """Lists of an attempt's outputs that were asked for while a write was in progress: a pod waits for
        another's."""

    def store(self, key, content):
        """Store bytes for pods to read."""
        self._s3.put_object(Bucket=BUCKET, Key=key, Body=content)

    def stored(self, key):
        """Return stored bytes; None if there are none. `key` may be an address."""
        try:
            return self._s3.get_object(Bucket=BUCKET, Key=key.removeprefix(f"s3://{BUCKET}/"))["Body"].read()
        except self._s3.exceptions.NoSuchKey:
            return None

    def keys(self, prefix):
        """Return the keys below `prefix`."""
        return [
            found["Key"]
            for found in self._s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        ]

    def fetch(self, address, folder):
        """Copy a stored directory to a local folder."""
        prefix = address.removeprefix(f"s3://{BUCKET}/").rstrip("/") + "/"
        for key in self.keys(prefix):
            file = folder / key.removeprefix(prefix)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.stored(key))
        return folder

    def CreateTask(self, request, context):
        _register(self.tasks, request, context)
        return task_pb2.TaskCreateResponse()

    def GetTask(self, request, context):
        spec = _registered(self.tasks, request, context).spec
        task = task_pb2.Task(id=request.id)
        task.closure.compiled_task.template.CopyFrom(spec.template)
        return task

    def CreateWorkflow(self, request, context):
        if found := compiler.errors(request.spec.template, self._closure(request)):
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"failed to compile workflow {request.id.name}: {found}"
            )
        _register(self.workflows, request, context)
        return workflow_pb2.WorkflowCreateResponse()

    def _closure(self, request):
        """Return all entities that a workflow may refer to: those registered before, and its subworkflows."""
        workflows = [workflow.spec.template for workflow in self.workflows.values()] + list(
            request.spec.sub_workflows
        )
        plans = {
            name: (
                plan.spec.workflow_id.name,
                {*plan.spec.fixed_inputs.literals, *plan.spec.default_inputs.parameters},
            )
            for name, plan in self.launch_plans.items()
        }
        return compiler.Closure([task.spec.template for task in self.tasks.values()], workflows, plans)

    def GetWorkflow(self, request, context):
        spec = _registered(self.workflows, request, context).spec
        workflow = workflow_pb2.Workflow(id=request.id)
        compiled = workflow.closure.compiled_workflow
        compiled.primary.template.CopyFrom(spec.template)
        for template in spec.sub_workflows:
            compiled.sub_workflows.add().template.CopyFrom(template)
        for task in self.tasks.values():
            compiled.tasks.add().template.CopyFrom(task.spec.template)
        return workflow

    def CreateLaunchPlan(self, request, context):
        _register(self.launch_plans, request, context)
        return launch_plan_pb2.LaunchPlanCreateResponse()

    def GetLaunchPlan(self, request, context):
        found = _registered(self.launch_plans, request, context)
        plan = launch_plan_pb2.LaunchPlan(id=request.id, spec=found.spec)
        plan.closure.expected_inputs.CopyFrom(found.spec.default_inputs)
        return plan

    def UpdateLaunchPlan(self, request, context):
        self.active.append(request.id.name)
        return launch_plan_pb2.LaunchPlanUpdateResponse()

    def CreateExecution(self, request, context):
        name = request.name or f"f{len(self.executions)}"
        self.executions[name] = request
        return execution_pb2.ExecutionCreateResponse(id=_execution_id(request.project, request.domain, name))

    def note(self, execution, node, task, outputs, parent="", launched=None):
        """Record a node's outputs; `parent` is the node that contains it, `launched` the execution that it
        launched."""
        self.nodes.setdefault(execution, {})[node] = (task, outputs, parent, launched)

    def GetExecution(self, request, context):
        if (made := self.executions.get(request.id.name)) is None or (made.project, made.domain) != _where(
            request.id
        ):
            context.abort(
                grpc.StatusCode.NOT_FOUND, f"missing entity of type execution with identifier {request.id}"
            )
        execution = execution_pb2.Execution(id=request.id, spec=made.spec)
        execution.closure.phase = self.phases.get(request.id.name, 1)  # QUEUED
        if (message := self.errors.get(request.id.name)) and execution.closure.phase == FAILED:
            execution.closure.error.message = message
        elif message:
            execution.closure.abort_metadata.cause = message
        now = execution.closure
        for stamp in (now.created_at, now.started_at, now.updated_at):
            stamp.GetCurrentTime()
        return execution

    def GetExecutionData(self, request, context):
        response = execution_pb2.WorkflowExecutionGetDataResponse(
            full_inputs=self.executions[request.id.name].inputs
        )
        for name, literal in self.outputs.get(request.id.name, {}).items():
            response.full_outputs.literals[name].CopyFrom(literal)
        return response

    def ListNodeExecutions(self, request, context):
        """List the nodes of an execution or those within one node, a page at a time, as flyteadmin does."""
        known = self.nodes.get(request.workflow_execution_id.name, {})
        names = [name for name, (_, _, parent, _) in known.items() if parent == request.unique_parent_id]
        first = int(request.token or 0)
        page = names[first : first + PAGE]
        listed = node_execution_pb2.NodeExecutionList(
            token=str(first + PAGE) if names[first + PAGE :] else ""
        )
        for name in page:
            one = listed.node_executions.add(id=_node_id(request.workflow_execution_id, name))
            one.metadata.is_parent_node = any(parent == name for _, _, parent, _ in known.values())
            one.closure.phase = 3  # SUCCEEDED
            for stamp in (one.closure.created_at, one.closure.started_at, one.closure.updated_at):
                stamp.GetCurrentTime()
            one.closure.deck_uri = self._deck(request.workflow_execution_id.name, name)
            if launched := known[name][3]:
                one.closure.workflow_node_metadata.executionId.CopyFrom(
                    _execution_id(*_where(one.id.execution_id), launched)
                )
        return listed

    def _deck(self, execution, node):
        """Return the address of the deck of a node's last attempt, which is beside its outputs; empty if
        there is none."""
        prefix = f"metadata/{execution}/{node}/"
        decks = [
            key for key in self.keys(prefix) if re.fullmatch(r"\d+/deck\.html", key.removeprefix(prefix))
        ]
        return f"s3://{BUCKET}/{max(decks)}" if decks else ""

    def ListTaskExecutions(self, request, context):
        node = request.node_execution_id
        task = self.nodes[node.execution_id.name][node.node_id][0]
        listed = task_execution_pb2.TaskExecutionList()
        if task:
            one = listed.task_executions.add()
            one.id.node_execution_id.CopyFrom(node)
            project, domain = _where(node.execution_id)
            one.id.task_id.CopyFrom(
                identifier_pb2.Identifier(resource_type=1, project=project, domain=domain, name=task)
            )
            for time in (one.closure.created_at, one.closure.started_at, one.closure.updated_at):
                time.GetCurrentTime()
        return listed

    def GetNodeExecutionData(self, request, context):
        known = self.nodes.get(request.id.execution_id.name, {})
        if request.id.node_id not in known:
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"missing entity of type node execution with identifier {request.id}",
            )
        outputs = literals_pb2.LiteralMap(literals=known[request.id.node_id][1])
        return node_execution_pb2.NodeExecutionGetDataResponse(full_outputs=outputs)

    def CreateDownloadLocation(self, request, context):
        place = {"Bucket": BUCKET, "Key": request.native_url.removeprefix(f"s3://{BUCKET}/")}
        return dataproxy_pb2.CreateDownloadLocationResponse(
            signed_url=self._s3.generate_presigned_url("get_object", Params=place)
        )

    def ListProjects(self, request, context):
        return project_pb2.Projects(projects=[project_pb2.Project(id="flytesnacks", name="flytesnacks")])

    def GetVersion(self, request, context):
        return version_pb2.GetVersionResponse(control_plane_version=version_pb2.Version(Version="v1.16.0"))

    def CreateUploadLocation(self, request, context):
        """Sign an upload; like flyteadmin (dataproxy/service.go), sign an existing key only for equal
        content."""
        root = request.filename_root or base64.b32encode(request.content_md5).decode()
        if not root:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "content_md5 or filename_root is a required parameter"
            )
        key = f"{request.project}/{request.domain}/{root}/{request.filename}"
        there = self.stored(key) if request.filename_root and request.filename else None
        if there is not None and request.content_md5 != hashlib.md5(there).digest():
            context.abort(grpc.StatusCode.ALREADY_EXISTS, f"file already exists at location [{key}]")
        given = {"ContentMD5": base64.b64encode(request.content_md5).decode()} if request.content_md5 else {}
        address = self._s3.generate_presigned_url(
            "put_object", Params={"Bucket": BUCKET, "Key": key, **given}
        )
        if request.content_md5:
            self.uploads.append(f"s3://{BUCKET}/{key}")
        return dataproxy_pb2.CreateUploadLocationResponse(
            signed_url=address, native_url=f"s3://{BUCKET}/{key}"
        )


class _Storage(ObservedS3):
    """Mock S3 whose writes below ab/ (raw data) are recorded, and end when the Admin lets them."""

    admin = None

    def answer(self, moto, environ, start):
        """Answer a request; a write of raw data waits while uploads are held."""
        key = environ["PATH_INFO"].removeprefix(f"/{BUCKET}/")
        if environ["REQUEST_METHOD"] != "PUT" or not key.startswith("ab/"):
            if self.admin and self.admin.arriving and "prefix=metadata" in environ["QUERY_STRING"]:
                self.admin.looks += 1
            return moto(environ, start)
        self.admin.arriving.append(key)
        try:
            assert self.admin.uploads_end.wait(600), "the test did not let the upload end"
            return moto(environ, start)
        finally:
            self.admin.arriving.remove(key)


def _register(entities, request, context):
    if hasattr(request.spec, "sub_workflows"):  # a workflow
        for template in (request.spec.template, *request.spec.sub_workflows):
            _sort_upstream(template.nodes)
    known = entities.get(request.id.name)
    if known is not None and known.id.version == request.id.version:
        if known != request:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"{request.id.name}: another entity has that version"
            )
        context.abort(grpc.StatusCode.ALREADY_EXISTS, f"{request.id.name} exists")
    entities[request.id.name] = request


def _sort_upstream(nodes):
    """Sort the upstream nodes, as Flyte's compiler does before it compares workflows: flytekit lists them in
    any order."""
    for node in nodes:
        node.upstream_node_ids.sort()
        if node.HasField("branch_node"):
            block = node.branch_node.if_else
            _sort_upstream([case.then_node for case in [block.case, *block.other]])


def _registered(entities, request, context):
    found = entities.get(request.id.name)
    if found is None or found.id.version != request.id.version:
        context.abort(grpc.StatusCode.NOT_FOUND, f"{request.id.name} does not exist")
    return found


def _where(execution):
    return execution.project, execution.domain


def _node_id(execution, name):
    return identifier_pb2.NodeExecutionIdentifier(execution_id=execution, node_id=name)


def _execution_id(project, domain, name):
    return identifier_pb2.WorkflowExecutionIdentifier(project=project, domain=domain, name=name)


@contextmanager
def flyteadmin(home: Path):
    """Serve an Admin on this machine; yield it and the environment variables with which pods reach its
    storage.

    pyflyte's configuration is written below `home`, the HOME of its user.
    """
    server = grpc.server(futures.ThreadPoolExecutor(4))
    storage = _Storage()
    with served(storage, BUCKET) as (s3, pods):
        admin = storage.admin = Admin(s3)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        dataproxy_pb2_grpc.add_DataProxyServiceServicer_to_server(admin, server)
        admin_port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        (home / ".flyte").mkdir(parents=True)
        (home / ".flyte" / "config.yaml").write_text(
            f"admin:\n  endpoint: dns:///127.0.0.1:{admin_port}\n  insecure: true\n"
        )
        try:
            yield admin, pods
        finally:
            server.stop(None)
