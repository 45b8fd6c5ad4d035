"""Recipe files: what a person decided."""

from flytune.recipe.data import Data, Source
from flytune.recipe.method import Method
from flytune.recipe.optimizers import OPTIMIZERS, OptimizerKind
from flytune.recipe.recipe import DataRequest, Recipe, json_schema
from flytune.recipe.sections import (
    Checkpoints,
    Evaluation,
    Guard,
    Hardware,
    HarnessTask,
    Model,
    Notify,
    Positive,
    Sharding,
)
from flytune.recipe.training import Training

__all__ = [
    "OPTIMIZERS",
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
    "OptimizerKind",
    "Positive",
    "Recipe",
    "Sharding",
    "Source",
    "Training",
    "json_schema",
    "sections",
]
