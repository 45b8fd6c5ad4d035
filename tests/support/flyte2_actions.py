"""Actions of Flyte 2 as processes of this machine: what its executor and Kubernetes do with a task's spec.

Addresses, variables and the order of attempts are those of the open backend:
executor/pkg/plugin/task_exec_context.go, task_exec_metadata.go. The outputs of an attempt are at
BUCKET/SHARD/PREFIX/PROJECT/DOMAIN/RUN/ACTION/ATTEMPT, with a shard of each action's own; the base of the run
has none.
"""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from flyteidl2.common import identifier_pb2, phase_pb2
from flyteidl2.core import execution_pb2, literals_pb2
from flyteidl2.plugins.kubeflow.pytorch_pb2 import DistributedPyTorchTrainingTask
from flyteidl2.task import task_definition_pb2
from flyteidl2.workflow import run_definition_pb2
from google.protobuf.json_format import MessageToDict, ParseDict

ETCD = 1_500_000
"""Bytes that etcd stores of an object."""

BUCKET, PREFIX = "flyte", "metadata"
SUCCEEDED, FAILED, ABORTED = (
    getattr(phase_pb2, f"ACTION_PHASE_{name}") for name in ("SUCCEEDED", "FAILED", "ABORTED")
)
QUEUED, RUNNING = phase_pb2.ACTION_PHASE_QUEUED, phase_pb2.ACTION_PHASE_RUNNING
PAUSED, TIMED_OUT = phase_pb2.ACTION_PHASE_PAUSED, phase_pb2.ACTION_PHASE_TIMED_OUT
ENDED = (SUCCEEDED, FAILED, ABORTED, TIMED_OUT)


@dataclass
class Action:
    """One action of a run."""

    id: identifier_pb2.ActionIdentifier
    parent: str
    spec: task_definition_pb2.TaskSpec
    inputs: str
    base: str
    cache_key: str = ""
    phase: int = QUEUED
    attempt: int = 0
    outputs: str = ""
    error: execution_pb2.ExecutionError | None = None
    pod: subprocess.Popen | None = None
    """Pod of the action, or of a job's first worker."""
    peers: list = field(default_factory=list)
    """Pods of a job's other workers."""
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    was_cached: bool = False
    version: int = 0
    """Number of its changes."""
    logs: list = field(default_factory=list)
    condition: run_definition_pb2.ConditionAction | None = None
    """Question of an action without a pod, which waits for an answer."""
    value: literals_pb2.Literal | None = None
    """Answer of a condition."""

    @property
    def pods(self):
        """Pods of all workers."""
        return [self.pod, *self.peers] if self.pod else []

    @property
    def task(self):
        """Name of its task."""
        return self.spec.task_template.id.name


class Executor:
    """Actions by their run and name, each run in a thread of its own; `changed` is notified of all
    changes."""

    def __init__(self, storage, folder, environment):
        self._storage, self._folder = storage, folder
        self.environment = environment
        """Variables of all pods, without the names of the action."""
        self.actions, self.cache = {}, {}
        self.changed = threading.Condition()
        self.before_pod = lambda action: None
        """Function that is called before each pod starts."""
        self.runs_pods = True
        """True if actions start; else they stay queued."""

    def enqueue(self, action):
        """Start an action; return whether it is new."""
        with self.changed:
            if (key := (action.id.run.name, action.id.name)) in self.actions:
                return False
            self.actions[key] = action
        if action.condition is not None:
            self._set(action, phase=PAUSED)
        elif self.runs_pods:
            threading.Thread(target=self._run, args=[action], daemon=True).start()
        return True

    def of_run(self, run):
        """Return the actions of a run in their order, the root first."""
        return [one for (name, _), one in list(self.actions.items()) if name == run]

    def signal(self, action, text):
        """Answer a condition, with a text; None is its timeout."""
        assert action.phase == PAUSED
        if text is None:
            self._end(action, TIMED_OUT)
            return
        primitive = literals_pb2.Primitive(string_value=text)
        action.value = literals_pb2.Literal(scalar=literals_pb2.Scalar(primitive=primitive))
        self._end(action, SUCCEEDED)

    def abort(self, run, reason, name=""):
        """End all actions of a run, or one."""
        for action in [one for one in self.of_run(run) if name in ("", one.id.name)]:
            self._end(action, ABORTED, error=execution_pb2.ExecutionError(code="Aborted", message=reason))
            for pod in action.pods:
                pod.kill()

    def close(self):
        """End all pods."""
        for action in self.actions.values():
            for pod in action.pods:
                pod.kill()
                pod.wait()

    def _run(self, action):
        if action.cache_key and (known := self.cache.get(action.cache_key)):
            action.was_cached = True
            self._end(action, SUCCEEDED, outputs=known)
            return
        retries = action.spec.task_template.metadata.retries.retries
        for attempt in range(1, retries + 2):
            action.attempt, prefix = attempt, _outputs(action, attempt)
            self._set(action, phase=RUNNING)
            self.before_pod(action)
            code = self._pod(action, prefix)
            if action.phase == ABORTED:
                return
            error, recoverable = self._error(prefix, code)
            if error is None:
                if action.cache_key:
                    self.cache[action.cache_key] = prefix
                self._end(action, SUCCEEDED, outputs=prefix)
                return
            if not recoverable:
                break
        self._end(action, FAILED, error=error)

    def _pod(self, action, prefix):
        """Run the container's command to its end; return the exit code."""
        folder = self._folder / action.id.run.name / f"{action.id.name}-{action.attempt}"
        folder.mkdir(parents=True)
        # Names of run and action are left as they are: the command takes them from the environment.
        values = {
            "{{.input}}": f"{action.inputs.removesuffix('/inputs.pb')}/inputs.pb",
            "{{.outputPrefix}}": prefix,
            "{{.rawOutputDataPrefix}}": prefix,
            "{{.checkpointOutputPrefix}}": f"{prefix}/_flytecheckpoints",
            "{{.prevCheckpointPrefix}}": "",
        }
        command = [values.get(one, one) for one in _container(action.spec.task_template)["args"]]
        environment = (
            self.environment
            | _names(action)
            | {"FLYTE_ATTEMPT_NUMBER": str(action.attempt - 1), "HOME": str(folder)}
        )
        count, rendezvous = _rendezvous(action)
        pods = []
        for number in range(count):
            log = folder / (f"log-{number}.txt" if number else "log.txt")
            if number == 0:
                action.logs.append(log)
            with log.open("wb") as out:
                pods.append(
                    subprocess.Popen(
                        [str(Path(sys.executable).with_name(command[0])), *command[1:]],
                        cwd=folder,
                        env=environment | rendezvous,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )
        action.pod, *action.peers = pods
        return self._first_end(pods)

    def _first_end(self, pods):
        """Return the exit code of the worker that ends first, with which a job ends; the others get SIGTERM
        then."""
        with ThreadPoolExecutor(len(pods)) as pool:
            waits = {pool.submit(pod.wait) for pod in pods}
            first = next(iter(wait(waits, return_when=FIRST_COMPLETED).done))
            for pod in pods:
                pod.terminate()
            return first.result()

    def _error(self, prefix, code):
        """Return the error of an attempt, None if it has succeeded, and whether another attempt may
        follow."""
        if (stored := self._storage.stored(f"{prefix}/error.pb")) is not None:
            error = execution_pb2.ErrorDocument.FromString(stored).error
            recoverable = error.kind == execution_pb2.ContainerError.RECOVERABLE
            return execution_pb2.ExecutionError(
                code=error.code, message=error.message, kind=error.origin
            ), recoverable
        if code == 0 and self._storage.stored(f"{prefix}/outputs.pb") is not None:
            return None, False
        if code == -signal.SIGKILL:
            # As the open backend was seen to end an action: its driver may start another one.
            killed = "[primary] terminated with exit code (137). Reason [OOMKilled]. Message: \n."
            return execution_pb2.ExecutionError(
                code="OOMKilled", message=killed, kind=execution_pb2.ExecutionError.USER
            ), False
        said = f"the pod ended with {code}, and stored neither outputs nor an error"
        return execution_pb2.ExecutionError(
            code="Interrupted", message=said, kind=execution_pb2.ExecutionError.SYSTEM
        ), True

    def _set(self, action, **values):
        with self.changed:
            for name, value in values.items():
                setattr(action, name, value)
            action.version += 1
            self.changed.notify_all()

    def _end(self, action, phase, outputs="", error=None):
        if action.phase not in ENDED:
            self._set(action, phase=phase, outputs=outputs, error=error)


def _rendezvous(action):
    """Return the number of pods, and the variables that the training operator sets: PET_RDZV_ID is none of
    them."""
    template = action.spec.task_template
    if template.type != "pytorch":
        return 1, {}
    job = ParseDict(MessageToDict(template.custom), DistributedPyTorchTrainingTask())
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return job.worker_replicas.replicas, {
        "PET_RDZV_ENDPOINT": f"localhost:{port}",  # on a cluster: JOB-ATTEMPT-worker-0:23456
        "PET_RDZV_BACKEND": job.elastic_config.rdzv_backend,
        "PET_NNODES": f"{job.elastic_config.min_replicas}:{job.elastic_config.max_replicas}",
        "PET_NPROC_PER_NODE": str(job.elastic_config.nproc_per_node),
        "PET_MAX_RESTARTS": str(job.elastic_config.max_restarts),
    }


def _container(template):
    """Return the primary container of a task's pod, or its only container."""
    if template.HasField("container"):
        return MessageToDict(template.container)
    return next(
        one
        for one in MessageToDict(template.k8s_pod.pod_spec)["containers"]
        if one["name"] == template.k8s_pod.primary_container_name or "args" in one
    )


def _outputs(action, attempt):
    shard = hashlib.sha256(f"{action.id.run.name}-{action.id.name}".encode()).hexdigest()[:2]
    base = action.base.removeprefix(f"s3://{BUCKET}/").strip("/")
    return f"s3://{BUCKET}/{shard}/{base}/{action.id.name}/{attempt}"


def _names(action):
    run = action.id.run
    return {
        "ACTION_NAME": action.id.name,
        "RUN_NAME": run.name,
        "_U_ORG_NAME": run.org,
        "_U_RUN_BASE": action.base,
        "FLYTE_INTERNAL_EXECUTION_PROJECT": run.project,
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": run.domain,
        "PATH": os.environ["PATH"],
    }
