"""Stand-in for propeller, which runs the tasks of a registered workflow in offline pods (kubelet.py).

A pod gets only an empty working directory, the image's environment, and the variables of Flyte and the training operator.
Inputs, outputs, code and raw data are in the admin's storage. An attempt is evaluated when its job has ended, an error before
outputs, as in flytepropeller (nodes/task/handler.go: ValidateOutput).
"""

import socket
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

from flyteidl.core import errors_pb2, literals_pb2
from google.protobuf.json_format import MessageToDict

from tests.chaos.pods import fill_command
from tests.support import kubelet
from tests.support.flyteadmin import BUCKET

# Runs first in each Python process of a pod. It hides the editable install of this checkout, which no image has; at exit it
# writes the paths of the project's imported modules.
SITE = """
import atexit, os, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
def write():
    names = {"flytune", "tasks", "workflows", "images", "demo", "tests"}
    files = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] in names and getattr(m, "__file__", None)]
    with open(os.environ["IMPORTED"], "a") as imported:
        imported.write("".join(file + chr(10) for file in files))
atexit.register(write)
if "SITE" in os.environ:
    exec(open(os.environ["SITE"]).read())
"""


class PodFailed(Exception):
    """Error of a failed pod with the console's message."""


class Run:
    """Execution with the values of its nodes and the folders of its pods, below `folder`.

    `images` has the images of the pods (tests/support/image.py) by the prefixes of their names.
    """

    def __init__(self, admin, execution, folder, environment, images=None):
        request = admin.executions[execution]
        plan = admin.launch_plans[request.spec.launch_plan.name].spec
        self.workflow = admin.workflows[plan.workflow_id.name].spec.template
        self.admin, self.name, self.folder = admin, execution, folder
        self.environment, self.images = environment, images
        self.taken = {}
        """Names of the tasks that were run, by node."""
        self.values = {"": {**plan.fixed_inputs.literals, **request.inputs.literals}}

    def until(self, task):
        """Run nodes in order up to the first whose task's name begins with `task`; return its outputs."""
        for node in _sorted(self.workflow.nodes):
            if node.id not in self.values:
                self.values[node.id] = self._run(node)
            if self.taken[node.id].startswith(task):
                return self.values[node.id]
        raise AssertionError(f"no node ran {task}")

    def pods(self, task):
        """Return the numbers of the pods of a task."""
        return [int(pod.name) for pod in (self.folder / task).iterdir()]

    def _run(self, node):
        inputs, chosen = self._inputs(node), node
        if node.HasField("branch_node"):
            chosen = _taken(node.branch_node.if_else, inputs)
            inputs = self._inputs(chosen)
        if chosen.HasField("array_node"):
            self.taken[node.id] = chosen.array_node.node.task_node.reference_id.name.rpartition(".")[2]
            over = [literal.collection for literal in inputs.values() if literal.HasField("collection")]
            assert [len(found.literals) for found in over] == [0], "the stand-in only maps over empty lists"
            return {"o0": literals_pb2.Literal(collection=literals_pb2.LiteralCollection())}
        task = self.admin.tasks[chosen.task_node.reference_id.name].spec.template
        name = task.id.name.rpartition(".")[2]
        self.taken[node.id] = name
        place = self.folder / name
        outputs = run_pods(self.admin, task, inputs, place, self.environment, self.name, images=self.images)
        self.admin.note(self.name, node.id, task.id.name, outputs)
        return outputs

    def _inputs(self, node):
        return {binding.var: self._literal(binding.binding) for binding in node.inputs}

    def _literal(self, data):
        if data.HasField("promise"):
            assert not data.promise.attr_path, "the stand-in does not look into values"
            return self.values[data.promise.node_id][data.promise.var]
        if data.HasField("collection"):
            items = [self._literal(item) for item in data.collection.bindings]
            return literals_pb2.Literal(collection=literals_pb2.LiteralCollection(literals=items))
        return literals_pb2.Literal(scalar=data.scalar)


def _sorted(nodes):
    """Yield each node after the nodes that it depends on."""
    left, done = [node for node in nodes if node.id not in ("start-node", "end-node")], {"", "start-node"}
    while left:
        node = next(node for node in left if set(node.upstream_node_ids) | _dependencies(node) <= done)
        left.remove(node)
        done.add(node.id)
        yield node


def _dependencies(node):
    return {binding.binding.promise.node_id for binding in node.inputs if binding.binding.HasField("promise")}


def _taken(block, inputs):
    for case in [block.case, *block.other]:
        comparison = case.condition.comparison
        assert comparison.operator == 0, "only == is supported"
        sides = [_primitive(side, inputs) for side in (comparison.left_value, comparison.right_value)]
        if sides[0] == sides[1]:
            return case.then_node
    raise PodFailed(block.error.message)


def _primitive(operand, inputs):
    return inputs[operand.var].scalar.primitive if operand.var else operand.primitive


class Attempt(NamedTuple):
    """One attempt at a task, as Flyte evaluates it."""

    pods: list[kubelet.Pod]
    condition: str
    """Condition of the pod or job: Succeeded or Failed."""
    error: errors_pb2.ContainerError | None
    outputs: dict | None


def container_of(task):
    """Return command and variables of the task's container, as registered."""
    container = _primary_container(task)
    return container["args"], {pair["name"]: pair["value"] for pair in container["env"]}


def working_directory(task):
    """Return the working directory of the task's container."""
    return _primary_container(task)["workingDir"]


def _primary_container(task):
    pod = MessageToDict(task.k8s_pod.pod_spec)
    (container,) = [one for one in pod["containers"] if one["name"] == task.config["primary_container_name"]]
    return container


def _image_of(task, images):
    """Return the image of the task's container, its writable paths (the template's volumes), and its working directory."""
    container = _primary_container(task)
    assert container["securityContext"]["readOnlyRootFilesystem"]
    volumes = [mount["mountPath"] for mount in container["volumeMounts"]]
    (image,) = [image for start, image in images.items() if container["image"].startswith(start)]
    return image, volumes, container["workingDir"]


def _rendezvous(task, port):
    """Return the number of pods and the variables that the training operator (1.8) sets; none for a plain pod."""
    if task.type != "pytorch":
        return 1, {}
    job = MessageToDict(task.custom)
    elastic = job["elasticConfig"]
    return int(job["workerReplicas"]["replicas"]), {
        "PYTHONUNBUFFERED": "0",
        "PET_RDZV_ENDPOINT": f"localhost:{port}",  # on a cluster: JOB-worker-0:23456
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_NNODES": f"{int(elastic['minReplicas'])}:{int(elastic['maxReplicas'])}",
        "PET_NPROC_PER_NODE": str(int(elastic["nprocPerNode"])),
        "PET_MAX_RESTARTS": str(int(elastic.get("maxRestarts", 0))),
    }


def run_pods(admin, task, inputs, folder, environment, execution, **disturbed):
    """Run a task, and return its outputs.

    Raises:
        PodFailed: the pods wrote an error document, or neither that nor outputs.
    """
    *failed, last = attempts(admin, task, inputs, folder, environment, execution, **disturbed)
    for attempt in failed:
        codes, logs = [pod.code for pod in attempt.pods], [pod.log_text()[-1000:] for pod in attempt.pods]
        warnings.warn(f"attempt failed: {attempt.condition}, {attempt.error}, exit codes {codes}, logs {logs}", stacklevel=2)
    if last.error is not None:
        raise PodFailed(last.error.message)
    if last.outputs is None:
        codes = [pod.code for pod in last.pods]
        raise PodFailed(f"{last.condition}, OutputsNotFound, exit codes {codes}\n{last.pods[0].log_text()[-3000:]}")
    return last.outputs


def attempts(admin, task, inputs, folder, environment, execution, strike=None, grace=None, images=None):
    """Run and yield attempts until there are outputs, an error is final, or the task has no retries left.

    `strike` is called repeatedly with the pods of the first attempt, to disturb them; `grace` overrides the grace period.
    """
    node = f"metadata/{execution}/{task.id.name}"
    literals = literals_pb2.LiteralMap(literals=inputs)
    admin.store(f"{node}/inputs.pb", literals.SerializeToString())
    args, variables = container_of(task)
    shares, seconds = _termination(task)
    image = _image_of(task, images) if images else None
    if image is None:
        del variables["PYTHONPATH"]  # the image's
    address, previous = f"s3://{BUCKET}/{node}", '""'
    for attempt in range(task.metadata.retries.retries + 1):
        prefix = f"{address}/{attempt}"
        # Raw data has a separate address, as on a cluster: LOCATION/SHARD/EXECUTION-NODE-ATTEMPT.
        raw = f"s3://{BUCKET}/ab/{execution}-{task.id.name}-{attempt}"
        command = fill_command(args, f"{address}/inputs.pb", prefix, raw, previous)
        count, rendezvous = _rendezvous(task, _free_port())
        flyte = {"FLYTE_INTERNAL_EXECUTION_ID": execution, "FLYTE_ATTEMPT_NUMBER": str(attempt)}
        where = folder if attempt == 0 else folder.with_name(f"{folder.name}-{attempt}")
        pods = []
        for index in range(count):
            # enable-distributed-error-aggregation: one error file for each pod.
            named = {"FLYTE_INTERNAL_DIST_ERROR_STRATEGY": "Earliest", "FLYTE_INTERNAL_WORKER_NAME": f"worker-{index}"}
            own = environment | variables | flyte | rendezvous | (named if count > 1 else {})
            pods.append(_start(command, where / str(index), own, index, shares, seconds if grace is None else grace, image))
        try:
            condition = kubelet.run(pods, strike if attempt == 0 else None)
            ended = Attempt(pods, condition, *_outcome(admin, f"{node}/{attempt}", condition))
            kubelet.end(pods)
        finally:
            for pod in pods:
                pod.kill()
        yield ended
        if ended.outputs is not None or (ended.error and ended.error.kind == errors_pb2.ContainerError.NON_RECOVERABLE):
            return
        previous = f"{prefix}/checkpoint"


def _outcome(admin, prefix, condition):
    """Return the earliest error and the outputs; neither if the pods have failed."""
    if condition == "Failed":
        return None, None
    found = [admin.stored(key) for key in admin.keys(f"{prefix}/error")]
    if errors := [errors_pb2.ErrorDocument.FromString(one).error for one in found]:
        return min(errors, key=lambda error: (error.timestamp.seconds, error.timestamp.nanos)), None
    if (outputs := admin.stored(f"{prefix}/outputs.pb")) is None:
        return None, None
    return None, dict(literals_pb2.LiteralMap.FromString(outputs).literals)


def _termination(task):
    """Return whether the pod's containers share a process namespace, and the seconds from SIGTERM to SIGKILL."""
    pod = MessageToDict(task.k8s_pod.pod_spec)
    return pod.get("shareProcessNamespace", False), pod.get("terminationGracePeriodSeconds", 30)


def _start(command, folder, environment, index, shares_processes, grace, image=None):
    """Start a pod in `folder`, which gets app (an empty /app), home, tmp, image (sitecustomize.py), log and imported.

    With an image, given with its writable paths and working directory, the pod has the image's files, and `folder` gets its log
    and volumes.
    """
    life = (index, shares_processes, grace)
    if image is not None:
        return _start_in(*image, command, folder, environment, life)
    for name in ("app", "home", "tmp", "image"):
        (folder / name).mkdir(parents=True)
    (folder / "image" / "sitecustomize.py").write_text(SITE)
    own = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": f"{folder / 'app'}:{folder / 'image'}",
        "IMPORTED": str(folder / "imported"),
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    return kubelet.Pod(command, folder / "app", own | environment, folder / "log", *life)


def _start_in(image, volumes, workdir, command, folder, environment, life):
    folder.mkdir(parents=True)
    few = {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    if not image.takes_code:  # as registered with --copy none
        command = command[command.index("--") + 1 :]
    command, where, variables = image.command(command, folder, few | environment, volumes, workdir)
    return kubelet.Pod(command, where, variables, folder / "log", *life)


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
