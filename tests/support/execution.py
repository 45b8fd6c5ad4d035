"""Stand-in for propeller's workflow nodes: an execution runs node by node, its tasks in the pods of
propeller.py.

Conditions, subworkflows, launch plans, signals, dynamic and array nodes follow flytepropeller v1.16
(pkg/controller/nodes). The job of a dynamic task is compiled before it runs. Array nodes map over tasks, with
a pod or job for each element, whose number is in its environment; failed elements yield None as long as
enough succeed.
"""

import math
from concurrent.futures import ThreadPoolExecutor

from flyteidl.core import dynamic_job_pb2, interface_pb2, literals_pb2, types_pb2, workflow_pb2

from tests.support import compiler
from tests.support.flyteadmin import FAILED, SUCCEEDED
from tests.support.propeller import PodFailed, run_pods

NOTHING = literals_pb2.Literal(scalar=literals_pb2.Scalar(none_type=literals_pb2.Void()))
CORES = 2
WITHIN = "-0-"
"""Separator in the id of a node of a subworkflow or of a dynamic task: PARENT-RETRY-NODE, as in
flytepropeller."""


def errors(job, outputs):
    """Return flytepropeller's errors for the dynamic job of a task with these outputs."""
    workflow = workflow_pb2.WorkflowTemplate(nodes=job.nodes, outputs=job.outputs)
    workflow.interface.CopyFrom(interface_pb2.TypedInterface(outputs=outputs))
    return compiler.errors(workflow, compiler.Closure(job.tasks, job.subworkflows))


class Run:
    """Execution of a registered workflow.

    Args:
        folder: folder of its pods, each below the name of its task and its number in the job. environment:
        variables that Flyte gives to all pods. images: stand-ins of the images by name
        (tests/support/image.py); without them, pods have this machine's packages.
    """

    def __init__(self, admin, execution, folder, environment, images=None):
        request = admin.executions[execution]
        plan = admin.launch_plans[request.spec.launch_plan.name].spec
        self.admin, self.name, self.folder = admin, execution, folder
        self.environment, self.images = environment, images
        defaults = {
            name: parameter.default
            for name, parameter in plan.default_inputs.parameters.items()
            if parameter.HasField("default")
        }
        inputs = {**defaults, **plan.fixed_inputs.literals, **request.inputs.literals}
        tasks = {name: task.spec.template for name, task in admin.tasks.items()}
        workflows = {name: workflow.spec.template for name, workflow in admin.workflows.items()}
        self._graph = _Graph(self, workflows[plan.workflow_id.name], inputs, tasks, workflows)
        self.values = self._graph.values
        """Outputs of the workflow's nodes that have run."""
        self.taken = {}
        """Names of the tasks that were run, by the paths of their nodes."""
        self.answer = lambda signal: None
        """Function that returns what a person sets a signal to; None where nobody answers in time."""
        self.options = {}
        """Further arguments of tests.support.propeller.attempts, by the names of tasks."""

    def until(self, task):
        """Run the workflow's nodes in order up to the first whose task's name begins with `task`; return its
        outputs."""
        for node in self._graph.run():
            if self.taken.get(node.id, "").startswith(task):
                return self.values[node.id]
        raise AssertionError(f"no node ran {task}")

    def outputs(self):
        """Run all nodes; return the workflow's outputs.

        Raises:
            PodFailed: a task has failed, and the workflow's failure node has run; the message is the
            console's.
        """
        try:
            made = self._graph.outputs()
        except PodFailed as error:
            self.admin.phases[self.name], self.admin.errors[self.name] = FAILED, str(error)
            raise
        self.admin.phases[self.name], self.admin.outputs[self.name] = SUCCEEDED, made
        return made

    def pods(self, task):
        """Return the numbers of the pods of a task."""
        return [int(pod.name) for pod in (self.folder / task).iterdir()]

    def run_task(self, task, inputs, path, name, variables=None):
        """Return the outputs of a task's pods, of a dynamic task those of its job."""
        folder = self.folder / name
        while folder.exists():
            folder = folder.with_name(f"{folder.name}+")
        environment = self.environment | (variables or {})
        key = _cache_key(task, inputs)
        if key is not None and (known := self.admin.cache.get(key)):
            return known
        where = {"node": path, "images": self.images} | self.options.get(name, {})
        try:
            made = run_pods(self.admin, task, inputs, folder, environment, self.name, **where)
            if key is not None:
                self.admin.cache[key] = made
            return made
        except PodFailed:
            attempt = f"metadata/{self.name}/{path}/{{}}/futures.pb"
            stored = [
                self.admin.stored(attempt.format(number))
                for number in range(task.metadata.retries.retries + 1)
            ]
            if not any(stored):
                raise
        (stored,) = filter(None, stored)
        job = dynamic_job_pb2.DynamicJobSpec.FromString(stored)
        if refused := errors(job, task.interface.outputs):
            raise PodFailed(f"[User] malformed dynamic workflow, caused by: {refused}")
        workflows = {subworkflow.id.name: subworkflow for subworkflow in job.subworkflows}
        return _Graph(
            self, job, {}, {task.id.name: task for task in job.tasks}, workflows, f"{path}{WITHIN}"
        ).outputs()


class _Graph:
    """Nodes of a workflow, or of a dynamic task's job, and their outputs."""

    def __init__(self, run, template, inputs, tasks, workflows, path=""):
        self._run, self._template, self._path = run, template, path
        self._tasks, self._workflows = tasks, workflows
        self.values = {"": dict(inputs)}

    def run(self):
        """Run all nodes that have not run, each after those that it depends on; yield each when it has
        run."""
        for node in _sorted(self._template.nodes):
            if node.id not in self.values:
                self.values[node.id] = self._outputs_of(node, self._inputs(node), node.id)
            yield node

    def outputs(self):
        """Run all nodes; return the outputs. After a failure, the failure node runs first."""
        try:
            for _ in self.run():
                pass
        except PodFailed as error:
            self._after(error)
            raise
        return {binding.var: self._literal(binding.binding) for binding in self._template.outputs}

    def _after(self, error):
        if isinstance(self._template, workflow_pb2.WorkflowTemplate) and self._template.HasField(
            "failure_node"
        ):
            message = literals_pb2.Literal(scalar={"error": {"failed_node_id": "fn0", "message": str(error)}})
            node = self._template.failure_node
            interface = self._tasks[node.task_node.reference_id.name].interface.inputs.variables
            # The input is optional, so that its literal names the variant.
            (kind,) = [
                variant
                for variant in interface["err"].type.union_type.variants
                if variant.simple == types_pb2.ERROR
            ]
            union = literals_pb2.Scalar(union={"value": message, "type": kind})
            self._outputs_of(node, self._inputs(node) | {"err": literals_pb2.Literal(scalar=union)}, "fn0")

    def _outputs_of(self, node, inputs, identifier):
        """Return a node's outputs; `identifier` is its own, or the one of the condition that has taken it."""
        path, kind = f"{self._path}{identifier}", node.WhichOneof("target")
        if kind == "branch_node":
            chosen = _taken(node.branch_node.if_else, inputs)
            return self._outputs_of(chosen, self._inputs(chosen), identifier)
        if kind == "workflow_node":
            return self._workflow_outputs(node.workflow_node, inputs, path)
        if kind == "gate_node":
            return self._signal(node)
        task = self._tasks[
            (node.array_node.node if kind == "array_node" else node).task_node.reference_id.name
        ]
        name = task.id.name.rpartition(".")[2]
        if kind == "array_node":
            # flytekit's name of a mapped task: map_TASK_HASH-arraynode.
            name = name.removeprefix("map_").rpartition("_")[0]
        self._run.taken[path] = name
        if kind == "array_node":
            return self._each(node.array_node, task, inputs, path, name)
        self._run.admin.note(self._run.name, path, task.id.name, {})
        outputs = self._run.run_task(task, inputs, path, name)
        self._run.admin.note(self._run.name, path, task.id.name, outputs)
        return outputs

    def _signal(self, node):
        """Return what a person has set a signal to, whose type flyteadmin compares; no person's name comes
        with it."""
        signal = node.gate_node.signal
        answer = self._run.answer(signal.signal_id)
        if answer is None:
            raise PodFailed(f"task execution timeout [{node.metadata.timeout.ToSeconds()}s] expired")
        assert (signal.type.simple, type(answer)) == (types_pb2.STRING, str), (
            "the value is not castable to the signal's type"
        )
        primitive = literals_pb2.Primitive(string_value=answer)
        return {
            signal.output_variable_name: literals_pb2.Literal(scalar=literals_pb2.Scalar(primitive=primitive))
        }

    def _workflow_outputs(self, node, inputs, path):
        if node.HasField("launchplan_ref"):
            plan = self._run.admin.launch_plans[node.launchplan_ref.name].spec
            name, inputs = plan.workflow_id.name, {**plan.fixed_inputs.literals, **inputs}
        else:
            name = node.sub_workflow_ref.name
        return _Graph(
            self._run, self._workflows[name], inputs, self._tasks, self._workflows, f"{path}{WITHIN}"
        ).outputs()

    def _each(self, array, task, inputs, path, name):
        """Return the lists of the outputs of all elements."""
        bound = set(array.bound_inputs)
        (size,) = {
            len(value.collection.literals)
            for key, value in inputs.items()
            if key not in bound and _is_list(value)
        }
        failures = {}

        def one(index):
            variables = {
                "BATCH_JOB_ARRAY_INDEX_VAR_NAME": "FLYTE_K8S_ARRAY_INDEX",
                "FLYTE_K8S_ARRAY_INDEX": str(index),
            }
            try:
                return self._run.run_task(task, inputs, f"{path}/{index}", f"{name}-{index}", variables)
            except PodFailed as error:
                failures[index] = f"[{index}]: {error}"
                return None

        with ThreadPoolExecutor(CORES) as executor:
            made = list(executor.map(one, range(size)))
        least = (
            array.min_successes
            if array.HasField("min_successes")
            else math.ceil(array.min_success_ratio * size)
        )
        if size - len(failures) < least:
            raise PodFailed("\n".join(failures.values()))
        return {output: _list(made, output) for output in task.interface.outputs.variables}

    def _inputs(self, node):
        return {binding.var: self._literal(binding.binding) for binding in node.inputs}

    def _literal(self, data):
        if data.HasField("promise"):
            assert not data.promise.attr_path, "the stand-in does not look into values"
            return self.values[data.promise.node_id][data.promise.var]
        if data.HasField("collection"):
            items = [self._literal(item) for item in data.collection.bindings]
            return literals_pb2.Literal(collection=literals_pb2.LiteralCollection(literals=items))
        if data.HasField("map"):
            items = {key: self._literal(item) for key, item in data.map.bindings.items()}
            return literals_pb2.Literal(map=literals_pb2.LiteralMap(literals=items))
        return literals_pb2.Literal(scalar=data.scalar)


def _cache_key(task, inputs):
    """Return the key of a task's outputs in Flyte's cache; None if it is not cached."""
    if not task.metadata.discoverable:
        return None
    hashed = {name: one.SerializeToString() for name, one in inputs.items()}
    for name in task.metadata.cache_ignore_input_vars:
        hashed.pop(name)
    return task.id.name, task.metadata.discovery_version, *sorted(hashed.items())


def _is_list(literal):
    return literal.HasField("collection")


def _list(made, output):
    """Return one output of all elements; None for each that failed."""
    items = [NOTHING if outputs is None else outputs[output] for outputs in made]
    return literals_pb2.Literal(collection=literals_pb2.LiteralCollection(literals=items))


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
    if block.HasField("else_node"):
        return block.else_node
    raise PodFailed(block.error.message)


def _primitive(operand, inputs):
    return inputs[operand.var].scalar.primitive if operand.var else operand.primitive
