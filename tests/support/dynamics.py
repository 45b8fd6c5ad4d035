"""Stand-in for propeller's dynamic and array nodes: the job of a dynamic task is compiled, and then run node by node.

Array nodes follow flytepropeller v1.16 (pkg/controller/nodes/array/handler.go): they map over tasks, with a pod or job for
each element, whose number is in its environment. Failed elements yield None as long as enough succeed.
"""

import math
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections import OrderedDict

from flyteidl.core import dynamic_job_pb2, errors_pb2, interface_pb2, literals_pb2, workflow_pb2
from flytekit import FlyteContextManager
from flytekit.bin import entrypoint
from flytekit.core.context_manager import ExecutionState
from flytekit.core.type_engine import TypeEngine
from flytekit.models.task import TaskSpec
from flytekit.tools.translator import get_serializable

from tests.chaos.pods import SETTINGS, fill_command
from tests.support import compiler
from tests.support.flyteadmin import BUCKET
from tests.support.propeller import PodFailed, Run, _sorted, container_of

NOTHING = literals_pb2.Literal(scalar=literals_pb2.Scalar(none_type=literals_pb2.Void()))


def future(task, **inputs):
    """Return the job that a dynamic task's pod returns to propeller."""
    context = FlyteContextManager.current_context().with_serialization_settings(SETTINGS)
    state = context.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    with FlyteContextManager.with_context(context.with_execution_state(state)) as inner:
        try:
            return task.compile_into_workflow(inner, task.task_function, **inputs).to_flyte_idl()
        finally:
            task._wf = None  # cached by flytekit; here one process and its forks stand for many pods


def errors(job, outputs):
    """Return flytepropeller's errors for the dynamic job of a task with these outputs."""
    workflow = workflow_pb2.WorkflowTemplate(nodes=job.nodes, outputs=job.outputs)
    workflow.interface.CopyFrom(interface_pb2.TypedInterface(outputs=outputs))
    return compiler.errors(workflow, compiler.Closure(job.tasks, job.subworkflows))


class CompleteRun(Run):
    """Complete execution in pods that are forks of this process, which need not import its modules again."""

    def __init__(self, admin, workflow, inputs, folder, environment):
        made = OrderedDict()
        self.workflow = get_serializable(made, SETTINGS, workflow).to_flyte_idl().template
        self.tasks = {}
        for spec in made.values():
            if isinstance(spec, TaskSpec):
                template = spec.to_flyte_idl().template
                self.tasks[template.id.name] = template
        given = {
            name: inputs.get(name, default) for name, (_, default) in workflow.python_interface.inputs_with_defaults.items()
        }
        context = FlyteContextManager.current_context()
        literals = TypeEngine.dict_to_literal_map(context, given, workflow.python_interface.inputs)
        self.admin, self.name, self.folder, self.environment = admin, "f0", folder, environment
        self.taken, self.values = {}, {"": dict(literals.to_flyte_idl().literals)}

    def outputs(self):
        """Return the workflow's outputs.

        Raises:
            PodFailed: a task has failed; the message is the console's.
        """
        for node in _sorted(self.workflow.nodes):
            self.values[node.id] = self._run(node)
        return {binding.var: self._literal(binding.binding) for binding in self.workflow.outputs}

    def _run(self, node):
        task = self.tasks[node.task_node.reference_id.name]
        self.taken[node.id] = name = task.id.name.rpartition(".")[2]
        return _task(self, task, self._inputs(node), name)


class _Job(CompleteRun):
    """Job of a dynamic task within another execution."""

    def __init__(self, outer, job, where):
        self.admin, self.environment, self.taken = outer.admin, outer.environment, outer.taken
        self.name, self.folder = f"{outer.name}-{where}", outer.folder
        self.workflow, self.tasks, self.values = job, {task.id.name: task for task in job.tasks}, {}

    def _run(self, node):
        array = node.array_node if node.HasField("array_node") else None
        inner = array.node if array else node
        task = self.tasks[inner.task_node.reference_id.name]
        name = task.id.name.rpartition(".")[2].removeprefix("map_").rsplit("_", bool(array))[0]
        self.taken[f"{self.name}-{node.id}"] = name
        inputs = self._inputs(node)
        return self._each(array, task, inputs, f"{name}-{node.id}") if array else _task(self, task, inputs, name)

    def _each(self, array, task, inputs, name):
        (size,) = {len(value.collection.literals) for value in inputs.values() if value.HasField("collection")}
        (output,) = task.interface.outputs.variables
        made, failures = [], []
        for index in range(size):
            environment = {"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "FLYTE_K8S_ARRAY_INDEX", "FLYTE_K8S_ARRAY_INDEX": str(index)}
            execution, folder = f"{self.name}-{name}-{index}", self.folder / f"{name}-{index}"
            try:
                made.append(_pod(self.admin, task, inputs, folder, self.environment | environment, execution)[output])
            except PodFailed as error:
                made.append(NOTHING)
                failures.append(f"[{index}]: {error}")
        least = array.min_successes if array.HasField("min_successes") else math.ceil(array.min_success_ratio * size)
        if size - len(failures) < least:
            raise PodFailed("\n".join(failures))
        return {output: literals_pb2.Literal(collection=literals_pb2.LiteralCollection(literals=made))}


def _task(run, task, inputs, name):
    """Return the outputs of one task; of a dynamic task, the outputs of its job."""
    try:
        return _pod(run.admin, task, inputs, run.folder / name, run.environment, run.name)
    except PodFailed:
        if (stored := run.admin.stored(f"metadata/{run.name}/{task.id.name}/futures.pb")) is None:
            raise
    job = dynamic_job_pb2.DynamicJobSpec.FromString(stored)
    if refused := errors(job, task.interface.outputs):
        raise PodFailed(f"[User] malformed dynamic workflow, caused by: {refused}")
    return _Job(run, job, name).outputs()


def _pod(admin, task, inputs, folder, environment, execution):
    """Return the outputs of a task of one pod.

    Raises:
        PodFailed: the pod wrote an error document, or neither that nor outputs.
    """
    prefix = f"metadata/{execution}/{task.id.name}"
    admin.store(f"{prefix}/inputs.pb", literals_pb2.LiteralMap(literals=inputs).SerializeToString())
    args, variables = container_of(task)
    del variables["PYTHONPATH"]  # of the image
    at = f"s3://{BUCKET}"
    command = fill_command(args, f"{at}/{prefix}/inputs.pb", f"{at}/{prefix}", f"{at}/ab/{execution}-{task.id.name}-0")
    folder.mkdir(parents=True)
    own = {"HOME": str(folder), "FLYTE_INTERNAL_EXECUTION_ID": execution, "FLYTE_ATTEMPT_NUMBER": "0"}
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        _become(command, environment | variables | own | {"TMPDIR": str(folder)}, folder)
    os.waitpid(pid, 0)
    if (error := admin.stored(f"{prefix}/error.pb")) is not None:
        raise PodFailed(errors_pb2.ErrorDocument.FromString(error).error.message)
    if (found := admin.stored(f"{prefix}/outputs.pb")) is None:
        raise PodFailed((folder / "log").read_text()[-3000:])
    return dict(literals_pb2.LiteralMap.FromString(found).literals)


def _become(command, environment, folder):
    try:
        descriptor = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(environment)
        tempfile.tempdir = None
        warnings.simplefilter("ignore")  # pytest turns warnings into errors
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        maps = command[0] == "pyflyte-map-execute"
        main = entrypoint.map_execute_task_cmd if maps else entrypoint.execute_task_cmd
        sys.argv = command
        main.main(command[1:], command[0], standalone_mode=False)
    except BaseException:  # noqa: BLE001 (any error of a pod goes to its log)
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the parent's exit functions must not run here.
        os._exit(0)
