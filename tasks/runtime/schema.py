"""What of a task's types goes into every workflow that has the task."""

from functools import cache
from typing import Any, TypeVar

from flytekit.extras.pydantic_transformer.transformer import PydanticTransformer
from flytekit.models.interface import TypedInterface, Variable
from flytekit.models.types import LiteralType, SimpleType, TypeStructure, UnionType

_Task = TypeVar("_Task", bound=Any)

# flytekit makes a class's JSON schema anew for every task and every field that has the class: 1,700 schemas of 31 classes, half
# the time that importing the workflows takes.
PydanticTransformer.get_literal_type = cache(PydanticTransformer.get_literal_type)


def trimmed(task: _Task) -> _Task:
    """The task itself, its structures without their JSON schema.

    A recipe's schema is 50 kB, and a workflow carries those of all its tasks, for each shape anew: more than the 2 MB that
    flyteadmin reads by default, and than etcd keeps. Workflows have it, for the console's form; Flyte compares two structures
    only where both have one (flytepropeller, pkg/compiler/validators/typing.go).
    """
    interface = task.interface
    # New ones: flytekit gives every task of a type the same.
    task._interface = TypedInterface(_variables(interface.inputs), _variables(interface.outputs))
    return task


def _variables(variables: dict[str, Variable]) -> dict[str, Variable]:
    return {
        name: Variable(
            _bare(one.type),
            one.description,
            artifact_partial_id=one.artifact_partial_id,
            artifact_tag=one.artifact_tag,
        )
        for name, one in variables.items()
    }


def _bare(kind: LiteralType) -> LiteralType:
    if kind.simple == SimpleType.STRUCT:
        return LiteralType(simple=SimpleType.STRUCT)
    if kind.collection_type is not None:
        return LiteralType(collection_type=_bare(kind.collection_type))
    if kind.union_type is not None:
        return LiteralType(union_type=UnionType([_variant(one) for one in kind.union_type.variants]))
    return kind


def _variant(kind: LiteralType) -> LiteralType:
    """Return it with the tag by which Flyte distinguishes a union's variants."""
    bare = _bare(kind)
    if bare is kind or kind.structure is None:
        return bare
    return LiteralType(
        simple=bare.simple, collection_type=bare.collection_type, structure=TypeStructure(tag=kind.structure.tag)
    )
