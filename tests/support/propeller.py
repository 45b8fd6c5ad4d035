"""Stand-in for propeller's task nodes: registered tasks run in offline pods (kubelet.py); execution.py runs
their workflows.

A pod gets only an empty working directory, the image's environment, and the variables of its spec, of Flyte
and of the training operator. One whose image no registry has is not started. Inputs, outputs, code and raw
data are in the admin's storage. An attempt is evaluated when its job has ended, an error before outputs, as
in flytepropeller (nodes/task/handler.go: ValidateOutput).
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

# Runs first in each Python process of a pod. It hides the editable install of this checkout, which no image
# has; at exit it writes the paths of the project's imported modules.
SITE = """
import atexit, os, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
def write():
    names = {"flytune", "training_estimates", "tasks", "workflows", "images", "demo", "tests"}
    modules = [m for n, m in sys.modules.items() if n.split(".")[0] in names]
    files = [m.__file__ for m in modules if getattr(m, "__file__", None)]
    with open(os.environ["IMPORTED"], "a") as imported:
        imported.write("".join(file + chr(10) for file in files))
atexit.register(write)
if "SITE" in os.environ:
    exec(open(os.environ["SITE"]).read())
"""


REGISTRY = {"FLYTUNE_REGISTRY": "registry.example.com/team", "FLYTUNE_TAG": "v7"}
"""Variables with which a laptop registers: the registry that has the images, and their tag."""
IMAGES = {kind: f"registry.example.com/team/flytune-{kind}:v7" for kind in ("train", "light")}
"""Names of all images that the registry has, by kind."""


DRAINED = (
    "[2/2] currentAttempt done. Last Error: USER::Job failed: PyTorchJobFailed - PyTorchJob f0-n4-1 is "
    "failing because 1 Worker replica(s) failed."
)
"""Flyte's message of a job that has lost a pod with its node; the operator deletes the others, with their
logs."""


class PodFailed(Exception):
    """Error of a failed pod with the console's message."""


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
    return container["args"], {pair["name"]: pair["value"] for pair in container["env"] if "value" in pair}


def image_name(task):
    """Return the name of the image of the task's container."""
    return _primary_container(task)["image"]


def working_directory(task):
    """Return the working directory of the task's container."""
    return _primary_container(task)["workingDir"]


def _primary_container(task):
    pod = MessageToDict(task.k8s_pod.pod_spec)
    (container,) = [one for one in pod["containers"] if one["name"] == task.config["primary_container_name"]]
    return container


def _image_of(task, images):
    """Return the image of the task's container, its writable paths (the template's volumes), and its working
    directory."""
    container = _primary_container(task)
    assert container["securityContext"]["readOnlyRootFilesystem"]
    volumes = [mount["mountPath"] for mount in container["volumeMounts"]]
    return images[container["image"]], volumes, container["workingDir"]


def _rendezvous(task, port):
    """Return the number of pods and the variables that the training operator (1.8) sets; none for a plain
    pod."""
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


def run_pods(admin, task, inputs, folder, environment, execution, **options):
    """Run a task, and return its outputs; the options are those of `attempts`.

    Raises:
        PodFailed: the pods wrote an error document, or neither that nor outputs.
    """
    *failed, last = attempts(admin, task, inputs, folder, environment, execution, **options)
    for attempt in failed:
        codes, logs = [pod.code for pod in attempt.pods], [pod.log_text()[-1000:] for pod in attempt.pods]
        warnings.warn(
            f"attempt failed: {attempt.condition}, {attempt.error}, exit codes {codes}, logs {logs}",
            stacklevel=2,
        )
    if last.error is not None:
        raise PodFailed(last.error.message)
    if any(pod.was_drained for pod in last.pods) and last.condition == "Failed":
        raise PodFailed(DRAINED)
    if last.outputs is None:
        codes = [pod.code for pod in last.pods]
        raise PodFailed(
            f"{last.condition}, OutputsNotFound, exit codes {codes}\n{last.pods[0].log_text()[-3000:]}"
        )
    return last.outputs


def attempts(
    admin,
    task,
    inputs,
    folder,
    environment,
    execution,
    node="n0",
    strike=None,
    grace=None,
    images=None,
    strikes=1,
    cold=None,
):
    """Run and yield attempts until there are outputs, an error is final, or the task has no retries left.

    Args:
        environment: variables that Flyte gives to all pods (default-env-vars). node: the node's path in the
        execution, which is part of its addresses. strike: function that is called repeatedly with the pods of
        the first attempt, or of the first `strikes` attempts, to
            disturb them.
        grace: seconds from SIGTERM to SIGKILL, instead of the pod's own. images: stand-ins of the images by
        name (image.py); without them, pods have this machine's packages. cold: True to start new
        interpreters, False to fork pods with this machine's packages; by default, those that fetch
            their code are forked.

    Raises:
        PodFailed: no registry has the image.
    """
    name = image_name(task)
    if name not in IMAGES.values():
        raise PodFailed(f"ErrImagePull: {name}: not found; the registry has {', '.join(IMAGES.values())}")
    raw_node = f"{execution}-{node.replace('/', '-')}"
    node = f"metadata/{execution}/{node}"
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
        raw = f"s3://{BUCKET}/ab/{raw_node}-{attempt}"
        command = fill_command(args, f"{address}/inputs.pb", prefix, raw, previous)
        count, rendezvous = _rendezvous(task, _free_port())
        flyte = {"FLYTE_INTERNAL_EXECUTION_ID": execution, "FLYTE_ATTEMPT_NUMBER": str(attempt)}
        where = folder if attempt == 0 else folder.with_name(f"{folder.name}-{attempt}")
        pods = []
        for index in range(count):
            # enable-distributed-error-aggregation: one error file for each pod.
            named = {
                "FLYTE_INTERNAL_DIST_ERROR_STRATEGY": "Earliest",
                "FLYTE_INTERNAL_WORKER_NAME": f"worker-{index}",
            }
            own = (
                environment
                | variables
                | flyte
                | rendezvous
                | (named if count > 1 else {})
                | _from_fields(task, index)
            )
            life = (index, shares, seconds if grace is None else grace)
            forks = command[0] == "pyflyte-fast-execute" if cold is None else not cold
            pods.append(_start(command, where / str(index), own, life, forks, image))
        try:
            condition = kubelet.run(pods, strike if attempt < strikes else None)
            ended = Attempt(pods, condition, *_outcome(admin, f"{node}/{attempt}", condition))
            kubelet.end(pods)
        finally:
            for pod in pods:
                pod.kill()
        yield ended
        if ended.outputs is not None or (
            ended.error and ended.error.kind == errors_pb2.ContainerError.NON_RECOVERABLE
        ):
            return
        if condition != "Failed" and admin.stored(f"{node}/{attempt}/futures.pb") is not None:
            return  # The job of a dynamic task, in place of outputs.
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


def _from_fields(task, index):
    """Return the variables that the kubelet sets from fields of the pod; a job's pods are on nodes n0, n1 and
    so on."""
    known = {"spec.nodeName": f"n{index}", "metadata.namespace": "flytesnacks-development"}
    sources = {
        pair["name"]: pair["valueFrom"] for pair in _primary_container(task)["env"] if "valueFrom" in pair
    }
    return {name: known[source["fieldRef"]["fieldPath"]] for name, source in sources.items()}


def _termination(task):
    """Return whether the pod's containers share a process namespace, and the seconds from SIGTERM to
    SIGKILL."""
    pod = MessageToDict(task.k8s_pod.pod_spec)
    return pod.get("shareProcessNamespace", False), pod.get("terminationGracePeriodSeconds", 30)


def _start(command, folder, environment, life, forks, image=None):
    """Start a pod in `folder`, which gets app (an empty /app), home, tmp, image (sitecustomize.py), log and
    imported.

    With an image, given with its writable paths and working directory, the pod has the image's files, and
    `folder` gets its log and volumes.
    """
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
    return kubelet.Pod(command, folder / "app", own | environment, folder / "log", *life, forks=forks)


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
