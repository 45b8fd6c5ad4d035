"""Stand-in for flytepropeller's compiler, which compares the types of all bindings with the interfaces of
their nodes.

flyteadmin compiles registered workflows, flytepropeller the jobs of dynamic tasks. It follows the compiler's
validators (v1.16: pkg/compiler/validators/interface.go, bindings.go, typing.go). An array node has the
interface of the node within it: flytekit makes lists of a mapped task's inputs, but not of a launch plan's.
"""

from flyteidl.core import types_pb2
from flyteidl.core.interface_pb2 import TypedInterface

NONE, STRING, STRUCT = types_pb2.NONE, types_pb2.STRING, types_pb2.STRUCT
_PRIMITIVES = {
    "integer": types_pb2.INTEGER,
    "float_value": types_pb2.FLOAT,
    "string_value": types_pb2.STRING,
    "boolean": types_pb2.BOOLEAN,
    "datetime": types_pb2.DATETIME,
    "duration": types_pb2.DURATION,
}


class Closure:
    """Templates of tasks and workflows by name, and each launch plan's workflow with the inputs that have
    defaults."""

    def __init__(self, tasks, workflows=(), launch_plans=None):
        self.tasks = {task.id.name: task for task in tasks}
        self.workflows = {workflow.id.name: workflow for workflow in workflows}
        self.launch_plans = launch_plans or {}


def errors(workflow, closure):
    """Return the compiler's errors for a workflow's template, its branches and its subworkflows, in Flyte's
    words."""
    return list(_Workflow(workflow, closure).errors())


class _Workflow:
    def __init__(self, workflow, closure):
        self.workflow, self.closure = workflow, closure
        self.nodes = dict(_all(workflow.nodes))

    def errors(self):
        nodes = dict(self.nodes)
        if self.workflow.HasField("failure_node"):
            nodes["failure"] = self.workflow.failure_node
        for identifier, node in nodes.items():
            if node.id in ("start-node", "end-node"):
                continue
            # A branch has no interface; its bindings may have any type.
            inputs = None if node.HasField("branch_node") else self.interface(node).inputs.variables
            yield from self.bound(identifier, node.inputs, inputs)
            if node.WhichOneof("target") == "workflow_node" and node.workflow_node.HasField(
                "sub_workflow_ref"
            ):
                yield from errors(
                    self.closure.workflows[node.workflow_node.sub_workflow_ref.name], self.closure
                )
        yield from self.bound("end-node", self.workflow.outputs, self.workflow.interface.outputs.variables)

    def interface(self, node):
        kind = node.WhichOneof("target")
        if kind == "task_node":
            return self.closure.tasks[node.task_node.reference_id.name].interface
        if kind == "array_node":
            return self.interface(node.array_node.node)
        if kind == "gate_node":
            found = TypedInterface()
            signal = node.gate_node.signal
            found.outputs.variables[signal.output_variable_name].type.CopyFrom(signal.type)
            return found
        if kind == "branch_node":
            first, *others = [self.interface(case.then_node).outputs.variables for case in _cases(node)]
            both = {name: first[name] for name in first if all(name in other for other in others)}
            found = TypedInterface()
            for name, variable in both.items():
                found.outputs.variables[name].CopyFrom(variable)
            return found
        if node.workflow_node.HasField("sub_workflow_ref"):
            return self.closure.workflows[node.workflow_node.sub_workflow_ref.name].interface
        workflow, defaults = self.closure.launch_plans[node.workflow_node.launchplan_ref.name]
        found, given = TypedInterface(), {binding.var for binding in node.inputs}
        found.CopyFrom(self.closure.workflows[workflow].interface)
        for name in set(defaults) - given:
            del found.inputs.variables[name]
        return found

    def bound(self, node, bindings, variables):
        names = [binding.var for binding in bindings]
        for binding in bindings:
            if variables is None:
                continue
            if binding.var not in variables:
                yield f"VariableNameNotFound: node [{node}] has no variable [{binding.var}]"
            else:
                yield from self.value(node, binding.var, binding.binding, variables[binding.var].type)
        for name in set(variables or ()) - set(names):
            if not any(variant.simple == NONE for variant in variables[name].type.union_type.variants):
                yield f"ParameterNotBound: [{name}] of node [{node}]"

    def value(self, node, name, data, expected):
        kind = data.WhichOneof("value")
        if kind in ("collection", "map") and expected.HasField("union_type"):
            fitting = [
                variant
                for variant in expected.union_type.variants
                if not list(self.value(node, name, data, variant))
            ]
            if len(fitting) != 1:
                yield f"IncompatibleBindingUnionValue: input [{name}] on node [{node}]"
        elif kind == "collection" or kind == "map":
            inner = "collection_type" if kind == "collection" else "map_value_type"
            if not expected.HasField(inner):
                yield (
                    f"MismatchingBindings: input [{name}] on node [{node}] expects {_text(expected)}. "
                    "Received bindings"
                )
                return
            items = data.collection.bindings if kind == "collection" else data.map.bindings.values()
            for item in items:
                yield from self.value(node, name, item, getattr(expected, inner))
        elif kind == "promise":
            source = self.source(data.promise)
            if source is None:
                yield f"ParameterNotBound: [{name}] of node [{node}]"
            elif not castable(source, expected):
                yield (
                    f"MismatchingTypes: [{name}] of node [{node}] expects {_text(expected)}, received "
                    f"{_text(source)}"
                )
        elif kind == "scalar":
            if not castable(type_of(data.scalar), expected):
                found = _text(type_of(data.scalar))
                yield (
                    f"MismatchingTypes: [{name}] of node [{node}] expects {_text(expected)}, received {found}"
                )
        else:
            yield (
                f"MismatchingBindings: input [{name}] on node [{node}] expects {_text(expected)}. "
                "Received nothing"
            )

    def source(self, promise):
        if promise.node_id in ("", "start-node"):
            variables = self.workflow.interface.inputs.variables
        elif promise.node_id in self.nodes:
            variables = self.interface(self.nodes[promise.node_id]).outputs.variables
        else:
            return None
        if promise.var not in variables:
            return None
        found = variables[promise.var].type
        for _ in promise.attr_path:
            found = found.collection_type if found.HasField("collection_type") else found.map_value_type
        return found


def castable(upstream, downstream):
    """Return the result of typing.go's AreTypesCastable, for the types of this project."""
    variants = upstream.union_type.variants
    if len(variants) == 1 and _casts(variants[0], downstream):
        return True
    return _casts(upstream, downstream)


def _casts(upstream, downstream):
    kind = downstream.WhichOneof("type")
    if kind == "union_type":
        wanted = downstream.union_type.variants
        if upstream.HasField("union_type"):
            return all(
                any(castable(variant, other) for other in wanted) for variant in upstream.union_type.variants
            )
        return sum(castable(upstream, one) for one in wanted) == 1
    if kind in ("collection_type", "map_value_type"):
        if not upstream.HasField(kind):
            return False
        inner = getattr(upstream, kind)
        return (
            not inner.WhichOneof("type") or inner.simple == NONE or _casts(inner, getattr(downstream, kind))
        )
    if kind == "blob":
        formats = upstream.blob.format, downstream.blob.format
        return upstream.HasField("blob") and ("" in formats or formats[0] == formats[1])
    if "enum_type" in (kind, upstream.WhichOneof("type")):
        return STRING in (upstream.simple, downstream.simple) or upstream.enum_type == downstream.enum_type
    tag = upstream.structure.tag
    if tag and tag != downstream.structure.tag:
        return False
    # Schemas of two structures are compared where both have one; tasks have none (tasks/runtime/schema.py).
    return (upstream.WhichOneof("type"), upstream.simple) == (kind, downstream.simple)


def type_of(scalar):
    """Return the type of a constant that is bound."""
    kind, found = scalar.WhichOneof("value"), types_pb2.LiteralType()
    if kind == "primitive":
        found.simple = _PRIMITIVES[scalar.primitive.WhichOneof("value")]
    elif kind == "blob":
        found.blob.CopyFrom(scalar.blob.metadata.type)
    elif kind == "binary":
        # A binary value with a tag is a structure in MessagePack.
        found.simple = STRUCT if scalar.binary.tag else types_pb2.BINARY
    elif kind == "union":
        found.union_type.variants.add().CopyFrom(scalar.union.type)
    else:
        found.simple = {"none_type": NONE, "generic": STRUCT, "error": types_pb2.ERROR}[kind]
    return found


def _cases(node):
    block = node.branch_node.if_else
    return [block.case, *block.other]


def _all(nodes, within=""):
    """Yield all nodes by id, including those of branches, which the compiler adds to the workflow under other
    ids."""
    for node in nodes:
        yield within + node.id, node
        if node.HasField("branch_node"):
            block = node.branch_node.if_else
            inner = [case.then_node for case in _cases(node)] + [block.else_node] * block.HasField(
                "else_node"
            )
            yield from _all(inner, f"{within}{node.id}-")


def _text(kind):
    return " ".join(str(kind).split())[:200]
