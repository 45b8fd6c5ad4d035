"""Stand-in for Flyte 2's control plane: the services that the SDK calls, by its own IDL over connect, with a
mock S3.

Answers are those of the open backend: dataproxy/service/dataproxy_service.go, runs/service/run_service.go.
Its bad manners are `Plane.manners`: what a method raises, or how long it takes.
"""

import base64
import hashlib
import threading
import time
from contextlib import contextmanager

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from flyteidl2.actions import actions_service_connect, actions_service_pb2
from flyteidl2.cluster import payload_pb2 as cluster_payload_pb2
from flyteidl2.cluster import service_connect
from flyteidl2.common import identifier_pb2, run_pb2
from flyteidl2.dataproxy import dataproxy_service_connect, dataproxy_service_pb2
from flyteidl2.logs.dataplane import payload_pb2
from flyteidl2.project import project_service_connect, project_service_pb2
from flyteidl2.secret import definition_pb2, secret_connect
from flyteidl2.secret import payload_pb2 as secret_payload_pb2
from flyteidl2.task import common_pb2, task_definition_pb2, task_service_connect, task_service_pb2
from flyteidl2.workflow import run_definition_pb2, run_service_connect, run_service_pb2, state_service_pb2
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wsgi import get_input_stream

from tests.support.flyte2_actions import BUCKET, ENDED, FAILED, PREFIX, Action, Executor
from tests.support.s3 import ObservedS3, served

ORG, PROJECT, DOMAIN = "testorg", "flytesnacks", "development"


class _Manners:
    """Interceptor of all calls: raises or waits as the plane's manners say for a method, or for all by the
    name `*`."""

    def __init__(self, plane):
        self._plane = plane

    def on_start_sync(self, ctx):
        method = ctx.method().name
        self._plane.calls.append(method)
        if (token := self._plane.token) and ctx.request_headers().get("authorization") != f"Bearer {token}":
            raise ConnectError(Code.UNAUTHENTICATED, "token is missing or has expired")
        found = self._plane.manners.get(method, self._plane.manners.get("*"))
        if isinstance(found, ConnectError):
            raise found
        if found:
            time.sleep(found)

    def on_end_sync(self, token, ctx, error=None):
        pass


class Plane:
    """Control plane with deployed tasks, triggers, runs and uploads."""

    def __init__(self, s3, folder, environment):
        self._s3 = s3
        self.manners, self.calls, self.token = {}, [], ""
        self.tasks, self.triggers, self.uploads, self.runs = {}, {}, [], {}
        self.secrets = set()
        """Names of the secrets that `flyte create secret` has made; those of Kubernetes are none of them."""
        self.executor = Executor(self, folder, environment)

    def store(self, address, content):
        """Store bytes at an address."""
        self._s3.put_object(Bucket=BUCKET, Key=address.removeprefix(f"s3://{BUCKET}/"), Body=content)

    def stored(self, address):
        """Return the bytes at an address; None if there are none."""
        try:
            return self._s3.get_object(Bucket=BUCKET, Key=address.removeprefix(f"s3://{BUCKET}/"))[
                "Body"
            ].read()
        except self._s3.exceptions.NoSuchKey:
            return None

    def below(self, prefix):
        """Return the keys of the storage below a prefix."""
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [found["Key"] for page in pages for found in page.get("Contents", [])]

    def get_project(self, request, ctx):
        if request.id != PROJECT:
            raise ConnectError(Code.NOT_FOUND, f"project {request.id} not found")
        domains = [project_service_pb2.Domain(id=DOMAIN, name=DOMAIN)]
        return project_service_pb2.GetProjectResponse(
            project=project_service_pb2.Project(id=PROJECT, name=PROJECT, domains=domains, org=ORG)
        )

    def list_projects(self, request, ctx):
        project = self.get_project(project_service_pb2.GetProjectRequest(id=PROJECT), ctx).project
        return project_service_pb2.ListProjectsResponse(
            projects=project_service_pb2.Projects(projects=[project])
        )

    def select_cluster(self, request, ctx):
        return cluster_payload_pb2.SelectClusterResponse()

    def deploy_task(self, request, ctx):
        key = (request.task_id.name, request.task_id.version)
        if key in self.tasks:
            raise ConnectError(Code.ALREADY_EXISTS, f"task {key} already exists")
        self.tasks[key] = request.spec
        self.triggers |= {trigger.name: trigger for trigger in request.triggers}
        return task_service_pb2.DeployTaskResponse()

    def list_tasks(self, request, ctx):
        wanted = [one.values[0] for one in request.request.filters if one.field == "name"]
        return task_service_pb2.ListTasksResponse(
            tasks=[
                task_definition_pb2.Task(task_id=_task_id(name, version))
                for name, version in self.tasks
                if not wanted or name in wanted
            ]
        )

    def get_task_details(self, request, ctx):
        spec = self.tasks.get((request.task_id.name, request.task_id.version))
        if spec is None:
            raise ConnectError(Code.NOT_FOUND, f"task {request.task_id.name} not found")
        return task_service_pb2.GetTaskDetailsResponse(
            details=task_definition_pb2.TaskDetails(task_id=request.task_id, spec=spec)
        )

    def create_upload_location(self, request, ctx):
        """Sign an upload; an existing key only for equal content."""
        if request.project != PROJECT:
            raise ConnectError(Code.NOT_FOUND, f"project {request.project} not found")
        root = request.filename_root or base64.b32encode(request.content_md5).decode()
        if not root:
            raise ConnectError(Code.INVALID_ARGUMENT, "content_md5 or filename_root is required")
        key = "/".join(filter(None, ["uploads", request.project, request.domain, root, request.filename]))
        there = self.stored(key) if request.filename and request.filename_root else None
        if there is not None and request.content_md5 != hashlib.md5(there).digest():
            raise ConnectError(Code.ALREADY_EXISTS, f"file already exists at [s3://{BUCKET}/{key}]")
        given = {"ContentMD5": base64.b64encode(request.content_md5).decode()} if request.content_md5 else {}
        signed = self._s3.generate_presigned_url("put_object", Params={"Bucket": BUCKET, "Key": key, **given})
        if request.content_md5:
            self.uploads.append(f"s3://{BUCKET}/{key}")
        return dataproxy_service_pb2.CreateUploadLocationResponse(
            signed_url=signed, native_url=f"s3://{BUCKET}/{key}"
        )

    def upload_inputs(self, request, ctx):
        content = request.inputs.SerializeToString(deterministic=True)
        digest = hashlib.sha256(content).hexdigest()[:16]
        folder = f"s3://{BUCKET}/uploads/{PROJECT}/{DOMAIN}/offloaded-inputs/{digest}"
        self.store(f"{folder}/inputs.pb", content)
        offloaded = run_pb2.OffloadedInputData(uri=folder, inputs_hash=digest)
        return dataproxy_service_pb2.UploadInputsResponse(offloaded_input_data=offloaded)

    def get_action_data(self, request, ctx):
        action = self._action(request.action_id)
        inputs, outputs = common_pb2.Inputs(), common_pb2.Outputs()
        inputs.ParseFromString(self.stored(f"{action.inputs.removesuffix('/inputs.pb')}/inputs.pb") or b"")
        if action.outputs:
            outputs.ParseFromString(self.stored(f"{action.outputs}/outputs.pb") or b"")
        return dataproxy_service_pb2.GetActionDataResponse(inputs=inputs, outputs=outputs)

    def create_download_link(self, request, ctx):
        """Sign the address of the report of an attempt."""
        attempt = request.action_attempt_id
        action = self._action(attempt.action_id)
        found = [
            key for key in self.below("") if key.endswith(f"/{action.id.name}/{attempt.attempt}/report.html")
        ]
        if not found:
            raise ConnectError(Code.NOT_FOUND, "no report")
        signed = self._s3.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": found[0]})
        return dataproxy_service_pb2.CreateDownloadLinkResponse(
            pre_signed_urls=dataproxy_service_pb2.PreSignedURLs(signed_url=[signed])
        )

    def tail_logs(self, request, ctx):
        """Send what the log of an attempt has, and end the stream of one that goes on; a real one is ended
        after 30 s."""
        action = self._action(request.action_id)
        ended = action.phase in ENDED
        lines = action.logs[-1].read_text(errors="replace").splitlines() if action.logs else []
        found = [
            payload_pb2.LogLine(message=line, originator=payload_pb2.LogLineOriginator.USER) for line in lines
        ]
        yield dataproxy_service_pb2.TailLogsResponse(
            logs=[dataproxy_service_pb2.TailLogsResponse.Logs(lines=found)]
        )
        if not ended:
            raise ConnectError(Code.CANCELED, "Request was cancelled")

    def list_secrets(self, request, ctx):
        found = [
            definition_pb2.Secret(id=definition_pb2.SecretIdentifier(name=name))
            for name in sorted(self.secrets)
        ]
        return secret_payload_pb2.ListSecretsResponse(secrets=found)

    def fire(self, name, kickoff):
        """Start the run of a trigger as the open backend's scheduler does; return the run's name.

        Where the schedule has an input for the kickoff, the run gets that one alone (trigger_executor.go).
        """
        trigger = self.triggers[name]
        argument = trigger.automation_spec.schedule.kickoff_time_input_arg
        if argument:
            inputs = common_pb2.Inputs()
            entry = inputs.literals.add(name=argument)
            entry.value.scalar.primitive.datetime.FromDatetime(kickoff)
            uri = self.upload_inputs(
                dataproxy_service_pb2.UploadInputsRequest(inputs=inputs), None
            ).offloaded_input_data
        elif trigger.spec.HasField("offloaded_input_data"):
            uri = trigger.spec.offloaded_input_data
        else:
            given = dataproxy_service_pb2.UploadInputsRequest(inputs=trigger.spec.inputs)
            uri = self.upload_inputs(given, None).offloaded_input_data
        task = [key for key in self.tasks if key[0].endswith(".scheduled_refresh")][-1]
        asked = run_service_pb2.CreateRunRequest(task_id=_task_id(*task), offloaded_input_data=uri)
        asked.project_id.name, asked.project_id.domain = PROJECT, DOMAIN
        return self.create_run(asked, None).run.action.id.run.name

    def create_run(self, request, ctx):
        run = request.run_id
        if not run.name:
            project = request.project_id
            name = f"r{len(self.runs):04}abcdefgh"
            run = identifier_pb2.RunIdentifier(
                org=ORG, project=project.name, domain=project.domain, name=name
            )
        if run.name in self.runs:
            raise ConnectError(Code.ALREADY_EXISTS, f"run {run.name} already exists")
        run.org = ORG
        self.runs[run.name] = request
        task = request.task_id
        spec = self.tasks[task.name, task.version] if request.HasField("task_id") else request.task_spec
        base = f"s3://{BUCKET}/{PREFIX}/{run.project}/{run.domain}/{run.name}/"
        action = Action(
            identifier_pb2.ActionIdentifier(run=run, name="a0"),
            "",
            spec,
            request.offloaded_input_data.uri,
            base,
        )
        self.executor.enqueue(action)
        return run_service_pb2.CreateRunResponse(run=run_definition_pb2.Run(action=_brief(action)))

    def get_run_details(self, request, ctx):
        action = self._action(identifier_pb2.ActionIdentifier(run=request.run_id, name="a0"))
        return run_service_pb2.GetRunDetailsResponse(
            details=run_definition_pb2.RunDetails(action=_details(action))
        )

    def get_action_details(self, request, ctx):
        return run_service_pb2.GetActionDetailsResponse(details=_details(self._action(request.action_id)))

    def watch_action_details(self, request, ctx):
        action, seen = self._action(request.action_id), -1
        while True:
            with self.executor.changed:
                self.executor.changed.wait_for(lambda: action.version != seen, timeout=600)  # noqa: B023
                seen = action.version
            yield run_service_pb2.WatchActionDetailsResponse(details=_details(action))
            if action.phase in ENDED:
                return

    def list_actions(self, request, ctx):
        found = [_brief(one) for one in self.executor.of_run(request.run_id.name)]
        return run_service_pb2.ListActionsResponse(actions=found)

    def abort_run(self, request, ctx):
        self.executor.abort(request.run_id.name, request.reason)
        return run_service_pb2.AbortRunResponse()

    def signal_event(self, request, ctx):
        action = self._action(request.action_id)
        if action.condition is None or request.payload.WhichOneof("value") != "string_value":
            raise ConnectError(Code.INVALID_ARGUMENT, "the payload is not what the condition takes")
        self.executor.signal(action, request.payload.string_value)
        return run_service_pb2.SignalEventResponse()

    def _action(self, of):
        action = self.executor.actions.get((of.run.name, of.name))
        if action is None or (of.run.project, of.run.domain) != (action.id.run.project, action.id.run.domain):
            raise ConnectError(Code.NOT_FOUND, f"run {of.run.name} action {of.name} not found")
        return action

    def enqueue(self, request, ctx):
        asked = request.action
        action = Action(
            asked.action_id,
            asked.parent_action_name,
            asked.task.spec,
            asked.input_uri,
            asked.run_output_base,
            asked.task.cache_key.value,
            condition=asked.condition if asked.HasField("condition") else None,
        )
        if not self.executor.enqueue(action):
            raise ConnectError(Code.ALREADY_EXISTS, f"{action.id.name} exists")
        return actions_service_pb2.EnqueueResponse()

    def watch_for_updates(self, request, ctx):
        parent, sent = request.parent_action_id, {}

        def news():
            of = [one for one in self.executor.of_run(parent.run.name) if one.parent == parent.name]
            return [one for one in of if sent.get(one.id.name) != one.version and one.version]

        first = True
        while True:
            with self.executor.changed:
                self.executor.changed.wait_for(lambda: first or news(), timeout=5)  # noqa: B023
                found = news()
            for action in found:
                sent[action.id.name] = action.version
                yield actions_service_pb2.WatchForUpdatesResponse(
                    action_update=state_service_pb2.ActionUpdate(
                        action_id=action.id,
                        phase=action.phase,
                        output_uri=action.outputs,
                        error=action.error,
                        value=action.value,
                    )
                )
            if first:
                yield actions_service_pb2.WatchForUpdatesResponse(
                    control_message=state_service_pb2.ControlMessage(sentinel=True)
                )
            first = False

    def abort(self, request, ctx):
        self.executor.abort(request.action_id.run.name, request.reason, request.action_id.name)
        return actions_service_pb2.AbortResponse()


def _task_id(name, version):
    return task_definition_pb2.TaskIdentifier(
        org=ORG, project=PROJECT, domain=DOMAIN, name=name, version=version
    )


def _status(action):
    status = run_definition_pb2.ActionStatus(phase=action.phase, attempts=action.attempt)
    status.start_time.FromDatetime(action.started)
    return status


def _metadata(action):
    if action.condition is not None:
        # The open backend leaves out the condition's name.
        condition = run_definition_pb2.ConditionActionMetadata(type=action.condition.type)
        kind = run_definition_pb2.ACTION_TYPE_CONDITION
        return run_definition_pb2.ActionMetadata(parent=action.parent, condition=condition, action_type=kind)
    task = action.spec.task_template.id
    return run_definition_pb2.ActionMetadata(
        parent=action.parent,
        task=run_definition_pb2.TaskActionMetadata(
            id=_task_id(task.name, task.version), short_name=action.spec.short_name
        ),
        action_type=run_definition_pb2.ACTION_TYPE_TASK,
    )


def _brief(action):
    return run_definition_pb2.Action(id=action.id, metadata=_metadata(action), status=_status(action))


def _details(action):
    spec = {"task": action.spec} if action.condition is None else {"condition": action.condition}
    details = run_definition_pb2.ActionDetails(
        id=action.id, metadata=_metadata(action), status=_status(action), **spec
    )
    if action.phase == FAILED:
        details.error_info.message, details.error_info.code = action.error.message, action.error.code
    return details


_SERVICES = (
    project_service_connect.ProjectServiceWSGIApplication,
    service_connect.ClusterServiceWSGIApplication,
    task_service_connect.TaskServiceWSGIApplication,
    dataproxy_service_connect.DataProxyServiceWSGIApplication,
    run_service_connect.RunServiceWSGIApplication,
    actions_service_connect.ActionsServiceWSGIApplication,
    secret_connect.SecretServiceWSGIApplication,
)


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type, message, *args):
        """Write nothing."""


class _Methods:
    """The methods of a plane, and for all others those of a service, which say that they are not
    implemented."""

    def __init__(self, plane):
        self._plane = plane

    def __getattr__(self, name):
        def missing(request, ctx):
            raise ConnectError(Code.UNIMPLEMENTED, f"{name} is not implemented")

        return getattr(self._plane, name, missing)


@contextmanager
def plane2(folder):
    """Serve a Plane on this machine; yield it, with `endpoint` and the variables of the storage in
    `storage`."""
    with served(ObservedS3(), BUCKET) as (s3, settings):
        settings["AWS_DEFAULT_REGION"] = "us-east-1"
        plane = Plane(s3, folder / "pods", dict(settings))
        services = {
            app.path: app
            for app in (kind(_Methods(plane), interceptors=[_Manners(plane)]) for kind in _SERVICES)
        }

        def application(environ, start):
            service = services.get(environ["PATH_INFO"].rpartition("/")[0])
            if service is None:
                start("404 Not Found", [("Content-Length", "0")])
                return []
            # connect reads a request to its end, which the socket of a client that waits does not have.
            environ["wsgi.input"] = get_input_stream(environ)
            return service(environ, start)

        server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        plane.endpoint, plane.storage = f"localhost:{server.server_port}", settings
        plane.executor.environment |= {
            "_U_EP_OVERRIDE": plane.endpoint,
            "_U_INSECURE": "true",
            "_U_USE_ACTIONS": "1",
            "FLYTE_DISABLE_TELEMETRY": "1",
        }
        try:
            yield plane
        finally:
            plane.executor.close()
            server.shutdown()


def configured(plane, folder, **admin):
    """Write the SDK's configuration for a plane into a folder; return the file."""
    import yaml
    from flyte.config._reader import get_config_file

    # The SDK reads a file once.
    get_config_file.cache_clear()
    file = folder / ".flyte" / "config.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "admin": {"endpoint": f"dns:///{plane.endpoint}", "insecure": True, **admin},
        "task": {"org": ORG, "project": PROJECT, "domain": DOMAIN},
    }
    file.write_text(yaml.safe_dump(content))
    return file
