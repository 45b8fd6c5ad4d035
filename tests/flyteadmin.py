"""A stand-in for Flyte's control plane: flyteidl's own gRPC services, which keep what pyflyte sends; storage is S3 (moto's).

It starts nothing: tests/propeller.py runs what was registered.
"""

import base64
import urllib.request
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
from flyteidl.admin import execution_pb2, launch_plan_pb2, project_pb2, task_pb2, version_pb2, workflow_pb2
from flyteidl.core import identifier_pb2
from flyteidl.service import admin_pb2_grpc, dataproxy_pb2, dataproxy_pb2_grpc

BUCKET = "flyte"


class Admin(admin_pb2_grpc.AdminServiceServicer, dataproxy_pb2_grpc.DataProxyServiceServicer):
    """What was registered, by name, latest version last; what was asked to run; the addresses of what was uploaded."""

    def __init__(self, s3):
        self._s3 = s3
        self.tasks, self.workflows, self.launch_plans, self.executions = {}, {}, {}, {}
        self.uploads = []
        self.active = []

    def store(self, key, content):
        """Puts bytes where pods find them."""
        self._s3.put_object(Bucket=BUCKET, Key=key, Body=content)

    def stored(self, key):
        """Bytes that pods or pyflyte have put there; None where nothing is. `key` may be an address."""
        try:
            return self._s3.get_object(Bucket=BUCKET, Key=key.removeprefix(f"s3://{BUCKET}/"))["Body"].read()
        except self._s3.exceptions.NoSuchKey:
            return None

    def keys(self, prefix):
        """Of all that is stored below `prefix`."""
        return [found["Key"] for found in self._s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])]

    def fetch(self, address, folder):
        """A stored directory as a folder."""
        prefix = address.removeprefix(f"s3://{BUCKET}/").rstrip("/") + "/"
        for key in self.keys(prefix):
            file = folder / key.removeprefix(prefix)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.stored(key))
        return folder

    def CreateTask(self, request, context):
        _keep(self.tasks, request, context)
        return task_pb2.TaskCreateResponse()

    def GetTask(self, request, context):
        spec = _kept(self.tasks, request, context).spec
        task = task_pb2.Task(id=request.id)
        task.closure.compiled_task.template.CopyFrom(spec.template)
        return task

    def CreateWorkflow(self, request, context):
        _keep(self.workflows, request, context)
        return workflow_pb2.WorkflowCreateResponse()

    def GetWorkflow(self, request, context):
        spec = _kept(self.workflows, request, context).spec
        workflow = workflow_pb2.Workflow(id=request.id)
        compiled = workflow.closure.compiled_workflow
        compiled.primary.template.CopyFrom(spec.template)
        for template in spec.sub_workflows:
            compiled.sub_workflows.add().template.CopyFrom(template)
        for task in self.tasks.values():
            compiled.tasks.add().template.CopyFrom(task.spec.template)
        return workflow

    def CreateLaunchPlan(self, request, context):
        _keep(self.launch_plans, request, context)
        return launch_plan_pb2.LaunchPlanCreateResponse()

    def GetLaunchPlan(self, request, context):
        found = _kept(self.launch_plans, request, context)
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

    def GetExecution(self, request, context):
        execution = execution_pb2.Execution(id=request.id, spec=self.executions[request.id.name].spec)
        execution.closure.phase = 1  # QUEUED
        return execution

    def ListProjects(self, request, context):
        return project_pb2.Projects(projects=[project_pb2.Project(id="flytesnacks", name="flytesnacks")])

    def GetVersion(self, request, context):
        return version_pb2.GetVersionResponse(control_plane_version=version_pb2.Version(Version="v1.16.0"))

    def CreateUploadLocation(self, request, context):
        key = f"{request.project}/{request.domain}/{base64.b32encode(request.content_md5).decode()}/{request.filename}"
        self.uploads.append(f"s3://{BUCKET}/{key}")
        address = self._s3.generate_presigned_url("put_object", Params={"Bucket": BUCKET, "Key": key})
        return dataproxy_pb2.CreateUploadLocationResponse(signed_url=address, native_url=self.uploads[-1])


def _keep(shelf, request, context):
    if hasattr(request.spec, "sub_workflows"):  # a workflow
        _sort_upstream(request.spec.template.nodes)
    known = shelf.get(request.id.name)
    if known is not None and known.id.version == request.id.version:
        if known != request:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{request.id.name}: another one has that version")
        context.abort(grpc.StatusCode.ALREADY_EXISTS, f"{request.id.name} is there")
    shelf[request.id.name] = request


def _sort_upstream(nodes):
    """As Flyte's compiler does before workflows are compared: flytekit gives these names in any order."""
    for node in nodes:
        node.upstream_node_ids.sort()
        if node.HasField("branch_node"):
            block = node.branch_node.if_else
            _sort_upstream([case.then_node for case in [block.case, *block.other]])


def _kept(shelf, request, context):
    found = shelf.get(request.id.name)
    if found is None or found.id.version != request.id.version:
        context.abort(grpc.StatusCode.NOT_FOUND, f"{request.id.name} is not there")
    return found


def _execution_id(project, domain, name):
    return identifier_pb2.WorkflowExecutionIdentifier(project=project, domain=domain, name=name)


@contextmanager
def flyteadmin(home: Path):
    """Serves an Admin on this machine while the block runs; yields it and the variables by which pods find its storage.

    `home` becomes the HOME of a shell that knows it: pyflyte's configuration is there.
    """
    import boto3
    from moto.server import ThreadedMotoServer

    storage = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    storage.start()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    host, port = storage.get_host_and_port()
    storage_at = f"http://{host}:{port}"
    try:
        s3 = boto3.client(
            "s3", region_name="us-east-1", endpoint_url=storage_at, aws_access_key_id="a", aws_secret_access_key="b"
        )
        s3.create_bucket(Bucket=BUCKET)
        admin = Admin(s3)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        dataproxy_pb2_grpc.add_DataProxyServiceServicer_to_server(admin, server)
        admin_port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        (home / ".flyte").mkdir(parents=True)
        (home / ".flyte" / "config.yaml").write_text(f"admin:\n  endpoint: dns:///127.0.0.1:{admin_port}\n  insecure: true\n")
        values = {"ENDPOINT": storage_at, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
        pods = {f"FLYTE_AWS_{name}": value for name, value in values.items()}
        yield admin, pods | {"AWS_ENDPOINT_URL": storage_at, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    finally:
        server.stop(None)
        # What is stored outlives the server: it is the process's.
        urllib.request.urlopen(urllib.request.Request(f"{storage_at}/moto-api/reset", method="POST")).close()
        storage.stop()
