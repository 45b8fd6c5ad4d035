"""Stand-in for `flytectl register files --archive`: a package goes to the control plane as flytectl 0.9 sends
it.

It follows cmd/register/register_util.go: files in the order of their names, the code uploaded without its
compression, blanks of identifiers filled, the two patterns of fast registration replaced where they are a
whole argument, entities that exist left alone. flytectl also passes pod specs through Kubernetes' Go types,
which keep the fields that they know.
"""

import base64
import gzip
import hashlib
import tarfile
import urllib.request
from pathlib import PurePosixPath

import grpc
import yaml
from flyteidl.admin import launch_plan_pb2, task_pb2, workflow_pb2
from flyteidl.service import admin_pb2_grpc, dataproxy_pb2, dataproxy_pb2_grpc

CODE, FOLDER = "{{ .remote_package_path }}", "{{ .dest_dir }}"
"""Patterns that flytectl replaces: the code's address, and the folder where pods unpack it."""
_KINDS = {"1": task_pb2.TaskSpec, "2": workflow_pb2.WorkflowSpec, "3": launch_plan_pb2.LaunchPlan}


def register(home, package, project, domain, version):
    """Register a package on the control plane of the configuration below `home`, without
    --destinationDirectory."""
    endpoint = yaml.safe_load((home / ".flyte" / "config.yaml").read_text())["admin"][
        "endpoint"
    ].removeprefix("dns:///")
    with tarfile.open(package) as archive, grpc.insecure_channel(endpoint) as channel:
        files = {one.name: archive.extractfile(one).read() for one in archive if one.isfile()}
        (code,) = [name for name in files if PurePosixPath(name).name.startswith("fast")]
        data, admin = (
            dataproxy_pb2_grpc.DataProxyServiceStub(channel),
            admin_pb2_grpc.AdminServiceStub(channel),
        )
        known = (project, domain, version)
        address = _upload(data, project, domain, PurePosixPath(code).name, gzip.decompress(files.pop(code)))
        for name in sorted(files):
            _send(admin, _KINDS[PurePosixPath(name).stem[-1]].FromString(files[name]), known, address)


def _upload(data, project, domain, name, content):
    md5 = hashlib.md5(content).digest()
    asked = dataproxy_pb2.CreateUploadLocationRequest(
        project=project, domain=domain, filename=name, content_md5=md5
    )
    place = data.CreateUploadLocation(asked)
    headers = {"Content-MD5": base64.b64encode(md5).decode(), "Content-Type": "application/octet-stream"}
    urllib.request.urlopen(urllib.request.Request(place.signed_url, content, headers, method="PUT")).close()
    return place.native_url


def _send(admin, message, known, address):
    if isinstance(message, launch_plan_pb2.LaunchPlan):
        _fill(message.id, known)
        _fill(message.spec.workflow_id, known)
        create, request = (
            admin.CreateLaunchPlan,
            launch_plan_pb2.LaunchPlanCreateRequest(id=message.id, spec=message.spec),
        )
    elif isinstance(message, workflow_pb2.WorkflowSpec):
        for template in (message.template, *message.sub_workflows):
            _fill(template.id, known)
            for node in [*template.nodes, *[template.failure_node] * template.HasField("failure_node")]:
                _fill_node(node, known)
        create, request = (
            admin.CreateWorkflow,
            workflow_pb2.WorkflowCreateRequest(id=message.template.id, spec=message),
        )
    else:
        _fill(message.template.id, known)
        for container in message.template.k8s_pod.pod_spec["containers"]:
            arguments = container["args"]
            for place, argument in enumerate(list(arguments)):
                arguments[place] = {CODE: address, FOLDER: "."}.get(argument, argument)
        create, request = admin.CreateTask, task_pb2.TaskCreateRequest(id=message.template.id, spec=message)
    try:
        create(request)
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.ALREADY_EXISTS:
            raise


def _fill_node(node, known):
    kind = node.WhichOneof("target")
    if kind == "task_node":
        _fill(node.task_node.reference_id, known)
    elif kind == "workflow_node":
        _fill(getattr(node.workflow_node, node.workflow_node.WhichOneof("reference")), known)
    elif kind == "array_node":
        _fill_node(node.array_node.node, known)
    elif kind == "branch_node":
        block = node.branch_node.if_else
        last = [block.else_node] if block.HasField("else_node") else []
        for one in [*(case.then_node for case in [block.case, *block.other]), *last]:
            _fill_node(one, known)


def _fill(identifier, known):
    for field, value in zip(("project", "domain", "version"), known, strict=True):
        setattr(identifier, field, getattr(identifier, field) or value)
