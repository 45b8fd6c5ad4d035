"""A stand-in for propeller and the kubelet: runs the tasks of a registered workflow, each in offline pods of its own.

A pod gets an empty working directory, the environment of the image and what Flyte and the training operator add; nothing else.
What it reads and writes (inputs, outputs, code, raw data) is in the admin's storage.
"""

import socket
import subprocess
import sys
from pathlib import Path

from flyteidl.core import errors_pb2, literals_pb2
from google.protobuf.json_format import MessageToDict

from chaos.pods import filled
from tests.flyteadmin import BUCKET

# Runs in each Python of a pod before anything else. The editable install of this checkout is no part of an image; and at the
# end it is told where the project's modules were from.
SITE = """
import atexit, os, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
def tell():
    names = {"flytune", "tasks", "workflows", "images", "demo", "chaos"}
    files = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] in names and getattr(m, "__file__", None)]
    with open(os.environ["IMPORTED"], "a") as told:
        told.write("".join(file + chr(10) for file in files))
atexit.register(tell)
if "SITE" in os.environ:
    exec(open(os.environ["SITE"]).read())
"""


class PodFailed(Exception):
    """What the console would show."""


class Run:
    """One execution: values that its nodes have, and the folders of its pods (below `folder`)."""

    def __init__(self, admin, execution, folder, environment):
        request = admin.executions[execution]
        plan = admin.launch_plans[request.spec.launch_plan.name].spec
        self.workflow = admin.workflows[plan.workflow_id.name].spec.template
        self.admin, self.name, self.folder = admin, execution, folder
        self.environment = environment
        self.taken = {}
        """Task that a node ran, by node."""
        self.values = {"": {**plan.fixed_inputs.literals, **request.inputs.literals}}

    def until(self, task):
        """Runs nodes in order, up to the one whose task's name begins with `task`; returns its outputs."""
        for node in _sorted(self.workflow.nodes):
            if node.id not in self.values:
                self.values[node.id] = self._run(node)
            if self.taken[node.id].startswith(task):
                return self.values[node.id]
        raise AssertionError(f"no node ran {task}")

    def pods(self, task):
        """Numbers of the pods that a task ran in."""
        return [int(pod.name) for pod in (self.folder / task).iterdir()]

    def _run(self, node):
        inputs, chosen = self._inputs(node), node
        if node.HasField("branch_node"):
            chosen = _taken(node.branch_node.if_else, inputs)
            inputs = self._inputs(chosen)
        task = self.admin.tasks[chosen.task_node.reference_id.name].spec.template
        name = task.id.name.rpartition(".")[2]
        self.taken[node.id] = name
        return run_pods(self.admin, task, inputs, self.folder / name, self.environment, self.name)

    def _inputs(self, node):
        return {binding.var: self._literal(binding.binding) for binding in node.inputs}

    def _literal(self, data):
        if data.HasField("promise"):
            assert not data.promise.attr_path, "a stand-in does not look into values"
            return self.values[data.promise.node_id][data.promise.var]
        if data.HasField("collection"):
            items = [self._literal(item) for item in data.collection.bindings]
            return literals_pb2.Literal(collection=literals_pb2.LiteralCollection(literals=items))
        return literals_pb2.Literal(scalar=data.scalar)


def _sorted(nodes):
    """Each after those it needs."""
    left, done = [node for node in nodes if node.id not in ("start-node", "end-node")], {"", "start-node"}
    while left:
        node = next(node for node in left if set(node.upstream_node_ids) | _needed(node) <= done)
        left.remove(node)
        done.add(node.id)
        yield node


def _needed(node):
    return {binding.binding.promise.node_id for binding in node.inputs if binding.binding.HasField("promise")}


def _taken(block, inputs):
    for case in [block.case, *block.other]:
        comparison = case.condition.comparison
        assert comparison.operator == 0, "only == is known here"
        sides = [_primitive(side, inputs) for side in (comparison.left_value, comparison.right_value)]
        if sides[0] == sides[1]:
            return case.then_node
    raise PodFailed(block.error.message)


def _primitive(operand, inputs):
    return inputs[operand.var].scalar.primitive if operand.var else operand.primitive


def container_of(task):
    """Command and variables of the task's container, as registered."""
    if task.HasField("container"):
        return list(task.container.args), {pair.key: pair.value for pair in task.container.env}
    pod = MessageToDict(task.k8s_pod.pod_spec)
    (container,) = [one for one in pod["containers"] if one["name"] == task.config["primary_container_name"]]
    return container["args"], {pair["name"]: pair["value"] for pair in container["env"]}


def _rendezvous(task, port):
    """What the training operator (1.8) sets in the pods of a PyTorchJob, which has no master; none in a plain pod."""
    if task.type != "pytorch":
        return 1, {}
    job = MessageToDict(task.custom)
    elastic = job["elasticConfig"]
    return int(job["workerReplicas"]["replicas"]), {
        "PYTHONUNBUFFERED": "0",
        "PET_RDZV_ENDPOINT": f"localhost:{port}",  # there: JOB-worker-0:23456
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_NNODES": f"{int(elastic['minReplicas'])}:{int(elastic['maxReplicas'])}",
        "PET_NPROC_PER_NODE": str(int(elastic["nprocPerNode"])),
        "PET_MAX_RESTARTS": str(int(elastic.get("maxRestarts", 0))),
    }


def run_pods(admin, task, inputs, folder, environment, execution):
    """Outputs of one task.

    Raises:
        PodFailed: as its error document says; or it wrote neither that nor outputs.
    """
    prefix = f"metadata/{execution}/{task.id.name}"
    literals = literals_pb2.LiteralMap(literals=inputs)
    admin.store(f"{prefix}/inputs.pb", literals.SerializeToString())
    args, variables = container_of(task)
    # Raw data has an address of its own, as on a cluster: LOCATION/SHARD/EXECUTION-NODE-ATTEMPT.
    command = [
        part.replace(f"{prefix}/raw", f"ab/{execution}-{task.id.name}-0")
        for part in filled(args, f"s3://{BUCKET}/{prefix}/inputs.pb", f"s3://{BUCKET}/{prefix}")
    ]
    pods, rendezvous = _rendezvous(task, _free_port())
    flyte = {"FLYTE_INTERNAL_EXECUTION_ID": execution, "FLYTE_ATTEMPT_NUMBER": "0"}
    started = [_start(command, folder / str(index), environment | variables | flyte | rendezvous) for index in range(pods)]
    codes = [process.wait(timeout=900) for process in started]
    if (error := admin.stored(f"{prefix}/error.pb")) is not None:
        raise PodFailed(errors_pb2.ErrorDocument.FromString(error).error.message)
    if (found := admin.stored(f"{prefix}/outputs.pb")) is None:
        raise PodFailed(f"exit codes {codes}\n{(folder / '0' / 'log').read_text()[-3000:]}")
    return dict(literals_pb2.LiteralMap.FromString(found).literals)


def _start(command, folder, environment):
    """A pod, in `folder`: app (the image's /app, empty), home, tmp, image (not of the project), its log, what it imported."""
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
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=folder / "app", env=own | environment, stdout=log, stderr=subprocess.STDOUT)


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
