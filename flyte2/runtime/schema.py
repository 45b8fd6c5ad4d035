"""Task interfaces without JSON schemas, which are 62 kB for a recipe, and which `flyte run --help` would
print.

A recipe that is sent to a cluster gets addresses in place of its local files, which are uploaded.
"""

import asyncio
from typing import Any

from flyte._run import _get_main_run_mode
from flyte.types import TypeEngine
from flyte.types._type_engine import PydanticTransformer
from flyteidl2.core.literals_pb2 import Literal
from flyteidl2.core.types_pb2 import LiteralType, SimpleType, TypeStructure

from flyte2.runtime.uploads import DataProxy
from flytune.cluster import signed_uploads
from flytune.recipe import Recipe
from flytune.schema import Strict


class SchemalessTransformer(PydanticTransformer):
    """Transformer of the project's models."""

    def __init__(self) -> None:
        super(PydanticTransformer, self).__init__("Flytune model", Strict, enable_type_assertions=False)

    def get_literal_type(self, t: Any) -> LiteralType:
        return LiteralType(
            simple=SimpleType.STRUCT, structure=TypeStructure(tag=f"{t.__module__}.{t.__qualname__}")
        )

    async def to_literal(self, python_val: Any, python_type: Any, expected: LiteralType) -> Literal:
        # In pods, and where no run is submitted, there is no mode.
        if isinstance(python_val, Recipe) and _get_main_run_mode() == "remote":
            # In a thread: it waits for the SDK's own event loop, which may be this one.
            python_val = await asyncio.to_thread(signed_uploads.of_recipe, DataProxy(), python_val)
        return await super().to_literal(python_val, python_type, expected)


def register() -> None:
    """Make the SDK use the transformer."""
    TypeEngine.register(SchemalessTransformer())
