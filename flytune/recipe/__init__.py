"""Recipe files: what a person decided."""

from flytune.recipe.recipe import DataRequest, Recipe, json_schema
from flytune.recipe.sections import (
    Checkpoints,
    Data,
    Evaluation,
    Guard,
    Hardware,
    HarnessTask,
    Method,
    Model,
    Notify,
    Positive,
    Sharding,
    Source,
    Training,
)

__all__ = [
    "Checkpoints",
    "Data",
    "DataRequest",
    "Evaluation",
    "Guard",
    "Hardware",
    "HarnessTask",
    "Method",
    "Model",
    "Notify",
    "Positive",
    "Recipe",
    "Sharding",
    "Source",
    "Training",
    "json_schema",
    "sections",
]
