"""Interfaces of tasks, and of workflows inside of others, without JSON schemas, which every workflow that has
them would carry."""

from functools import cache
from typing import Any, TypeVar

from flytekit.core.type_engine import TypeEngine
from flytekit.extras.pydantic_transformer.transformer import PydanticTransformer
from flytekit.models.interface import TypedInterface, Variable
from flytekit.models.types import LiteralType, SimpleType, TypeStructure, UnionType

from flytune.schema import Strict

_Part = TypeVar("_Part", bound=Any)


class ModelTransformer(PydanticTransformer):
    """Transformer for the project's models, which makes the JSON schema of a class once.

    flytekit's makes it again for every task and every field of the class: 1,700 schemas of 31 classes, half
    the time that importing the workflows takes.
    """

    def __init__(self, name: str = "Flytune model", model: type[Strict] = Strict) -> None:
        super(PydanticTransformer, self).__init__(name, model, enable_type_assertions=False)

    def get_literal_type(self, t: Any) -> LiteralType:
        return _literal_type(t)


@cache
def _literal_type(kind: Any) -> LiteralType:
    return PydanticTransformer().get_literal_type(kind)


TypeEngine.register(ModelTransformer())


def without_schema(part: _Part) -> _Part:
    """Remove the JSON schemas from the interface of a task, or of a workflow that others contain, and return
    it.

    A recipe's schema has 62 kB, and a workflow carries those of all its tasks for each shape: more than the 2
    MB that flyteadmin reads by default, and than etcd stores. Workflows that people start keep theirs for the
    console's form; Flyte compares the schemas of two structures only where both have one (flytepropeller,
    pkg/compiler/validators/typing.go).
    """
    interface = part.interface
    # New variables: flytekit shares one object between all tasks that use a type.
    part._interface = TypedInterface(_variables(interface.inputs), _variables(interface.outputs))
    return part


def _variables(variables: dict[str, Variable]) -> dict[str, Variable]:
    return {
        name: Variable(
            _type_without_schema(variable.type),
            variable.description,
            artifact_partial_id=variable.artifact_partial_id,
            artifact_tag=variable.artifact_tag,
        )
        for name, variable in variables.items()
    }


def _type_without_schema(kind: LiteralType) -> LiteralType:
    if kind.simple == SimpleType.STRUCT:
        return LiteralType(simple=SimpleType.STRUCT)
    if kind.collection_type is not None:
        return LiteralType(collection_type=_type_without_schema(kind.collection_type))
    if kind.union_type is not None:
        return LiteralType(union_type=UnionType([_variant(variant) for variant in kind.union_type.variants]))
    return kind


def _variant(kind: LiteralType) -> LiteralType:
    """Return the variant without its schema, but with the tag by which Flyte distinguishes a union's
    variants."""
    bare = _type_without_schema(kind)
    if bare is kind or kind.structure is None:
        return bare
    return LiteralType(
        simple=bare.simple,
        collection_type=bare.collection_type,
        structure=TypeStructure(tag=kind.structure.tag),
    )
